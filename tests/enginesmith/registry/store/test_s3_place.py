import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesmith.core.errors import InputError
from enginesmith.registry.store.objects.place import S3Location, parse_s3_place

NAMES = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}[a-z0-9]", fullmatch=True)
PARTS = st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True), max_size=3).map("/".join)


@given(
    st.builds(
        S3Location,
        bucket=NAMES,
        prefix=PARTS,
        endpoint=st.sampled_from([None, "http://127.0.0.1:9000", "https://s3.example.org/base"]),
        region=st.sampled_from([None, "eu-central-1"]),
        path_style=st.sampled_from([None, True, False]),
        sse=st.sampled_from([None, "AES256", "aws:kms"]),
    )
)
def test_a_place_survives_its_uri(place: S3Location) -> None:
    assert parse_s3_place(place.uri, {}) == place


def test_the_environment_completes_the_uri() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://a:1", "AWS_REGION": "eu-west-1"}
    assert parse_s3_place("s3://bkt/a/b/", environment) == S3Location("bkt", "a/b", "http://a:1", "eu-west-1")
    environment["AWS_ENDPOINT_URL_S3"] = "http://b:2"
    assert parse_s3_place("s3://bkt", environment).endpoint == "http://b:2"
    options = "s3://bkt?endpoint=http://c:3&region=x"
    assert parse_s3_place(options, environment) == S3Location("bkt", "", "http://c:3", "x")


def test_a_write_sends_encryption_keys_and_conditions() -> None:
    place = parse_s3_place("s3://bkt/team?sse=aws:kms&kms_key=arn:aws:kms:eu-west-1:1:key/k", {})
    assert place.key("models/a.json") == "team/models/a.json" and place.locator("a") == "s3://bkt/team/a"
    assert place.encryption() == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:aws:kms:eu-west-1:1:key/k"}
    assert parse_s3_place(place.uri, {}) == place and S3Location("bkt").encryption() == {}


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://", "not the name of a bucket"),
        ("s3://Bucket", "not the name of a bucket"),
        ("s3://ab", "not the name of a bucket"),
        ("s3://bkt/../x", "each part of the prefix"),
        ("s3://bkt/a//b", "each part of the prefix"),
        ("s3://bkt/a%2Fb", "each part of the prefix"),
        ("s3://bkt?colour=red", "option 'colour' is not known; known: endpoint, region"),
        ("s3://bkt?region=a&region=b", "twice"),
        ("s3://bkt?region=", "without a value"),
        ("s3://bkt?region=../x", "region"),
        ("s3://bkt?endpoint=localhost:9000", "not a URL"),
        ("s3://bkt?path_style=maybe", "must be 1 or 0"),
        ("s3://bkt?sse=rot13", "must be one of AES256"),
        ("s3://bkt?kms_key=k", "needs sse=aws:kms"),
        ("s3://KEY:hunter2@bkt/x", "without user or password"),
        ("s3://bkt?endpoint=http://user:hunter2@host", "without user, password"),
        ("s3://bkt?aws_secret_access_key=hunter2", "not known"),
    ],
)
def test_an_invalid_location_is_reported_without_secrets(uri: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error_info:
        parse_s3_place(uri, {})
    assert "hunter2" not in str(error_info.value)
