"""Probes of vector instructions are answered from the record of the cache, and made where it has none."""

import pytest
from torch._inductor.cpu_vec_isa import VecAVX2

from enginesmith.compile_caches.probes import record_probes, use_probes


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def probe(_self: object, library: str) -> bool:
        made.append(library)
        return "good" in library

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.VecISA._probe_load", probe)
    return made


def test_what_was_probed_is_on_record_whether_it_held_or_not(probed: list[str]) -> None:
    record = record_probes()
    assert [VecAVX2()._probe_load(f"/cache/{name}.so") for name in ("good", "bad")] == [True, False]
    assert record == {"good.so": True, "bad.so": False} and len(probed) == 2


def test_a_probe_on_record_is_not_made_again_wherever_its_library_lies(probed: list[str]) -> None:
    use_probes({"good.so": True, "bad.so": False})
    isa = VecAVX2()
    assert [isa._probe_load(f"/other/{name}.so") for name in ("good", "bad")] == [True, False] and not probed
    assert isa._probe_load("/other/new-good.so") and probed == ["/other/new-good.so"]
