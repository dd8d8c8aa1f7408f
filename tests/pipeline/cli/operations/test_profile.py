"""`enginery profile`: one engine timed, two raced."""

from tests.pipeline.projects import Project


def test_profile_times_one_engine_and_races_two(built: Project) -> None:
    words = ("profile", "tiny", "--target", "cpu", "--quiet", "--json")
    asked = ("--precision", "fp32", "--seconds", 0.005, "--bucket", "batch=3", "--streams", 2)
    report = built.run(*words, *asked).json
    (bucket,) = report["buckets"]
    assert bucket["name"] == "batch=3" and bucket["streams"] == 2 and bucket["streams_items_per_s"] > 0
    assert report["model"] == "tiny" and report["anatomy"]["bucket"] == "batch=3"
    assert len(report["anatomy"]["profile"]["nodes"]) == report["anatomy"]["traffic"]["groups"]
    race = ("--precision", "fp32", "--against", "tiny", "--against-precision", "int8", "--seconds", 0.4)
    found = built.run(*words, *race).json
    assert found["verdict"] in ("faster", "slower", "no difference shown") and found["bucket"] == "batch=4"
    assert (found["first"]["precision"], found["second"]["precision"]) == ("fp32", "int8")
    assert found["ratios"][0]["low"] < found["ratios"][0]["ratio"] < found["ratios"][0]["high"]
    wrong = built.run("profile", "tiny", "--target", "cpu", "--bucket", "batch=9")
    assert wrong.code == 2 and "batch goes from 1 to 8" in wrong.err
