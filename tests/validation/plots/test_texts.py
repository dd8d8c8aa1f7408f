from validation.plotting import number_text, percent_text, seconds_text, share_text


def test_numbers_are_short_and_have_units():
    assert [number_text(value) for value in (0.0, -1.23456, 1e-7, 48200.0)] == ["0", "−1.23", "1e−7", "4.82e4"]  # noqa: RUF001
    assert [share_text(share) for share in (0.0, 2e-7, 0.000123, 0.5)] == ["0", "under 0.001 %", "0.012 %", "50 %"]
    assert [seconds_text(value) for value in (1.5, 0.0123, 45e-6, 3e-9)] == ["1.5 s", "12.3 ms", "45 µs", "3 ns"]
    assert [seconds_text(value) for value in (0.99999, 999.96e-9)] == ["1 s", "1 µs"]
    assert [percent_text(value) for value in (0.031, -0.02, 0.0)] == ["+3.1 %", "−2 %", "0 %"]  # noqa: RUF001
