import pytest

from enginesmith.core.errors import DataError
from enginesmith.recording.json_lines import JsonLinesReader


@pytest.mark.parametrize(
    "line", ['{"at": 0, "at": 1}', '{"inputs": {"x": [1], "x": [2]}}', '{"a": [{"b": {"c": 1, "c": 1}}]}']
)
def test_a_duplicate_key_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "traffic.jsonl"
    path.write_text(f'{{"format": 1}}\n{line}\n')
    with pytest.raises(DataError, match=r"traffic\.jsonl:2: is not JSON \(key '.+' is given twice\); remove the line"):
        list(JsonLinesReader(path, 1000))


@pytest.mark.parametrize("line", ['{"at": 0, "at": 1}', '{"at": NaN}'])
def test_a_complete_last_line_needs_no_newline(tmp_path, line):
    path = tmp_path / "traffic.jsonl"
    path.write_text(f'{{"format": 1}}\n{line}')
    with pytest.raises(DataError, match=r"traffic\.jsonl:2: is not JSON"):
        list(JsonLinesReader(path, 1000))
    path.write_text('{"format": 1}\n{"at": 0, "a')
    reader = JsonLinesReader(path, 1000)
    assert [record for _, record in reader] == [{"format": 1}] and reader.cut
