import time

import pytest

from builders.execution.scrub import HIDDEN, scrubber

SECRET = "hunter2hunter2"
PLAIN = scrubber({})


@pytest.mark.parametrize(
    "text",
    [
        f"cloning https://user:{SECRET}@git.example/x",
        f"s3://AKIA:{SECRET}@bucket/key",
        f"https://{SECRET}@git.example/x",
        f"Authorization: Bearer {SECRET}",
        f"authorization: Basic {SECRET}==",
        f"'Authorization': 'AWS4-HMAC-SHA256 Credential=x, Signature={SECRET}'",
        f"curl -H 'bearer {SECRET}'",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f'{{"aws_secret_access_key": "{SECRET}"}}',
        f"password: {SECRET}",
        f"db_password='{SECRET}'",
        f"api-key={SECRET}&x=1",
        f"https://b.s3.example/k?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"session_token = {SECRET}",
        f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
        f"ghp_{SECRET}{SECRET}",
        f"hf_{SECRET}{SECRET}",
        f"eyJ{SECRET}.{SECRET}.{SECRET}",
    ],
)
def test_a_credential_is_hidden_by_its_form(text: str) -> None:
    assert SECRET not in PLAIN(text) and HIDDEN in PLAIN(text)


def test_an_access_key_id_is_hidden() -> None:
    assert PLAIN("key AKIAIOSFODNN7EXAMPLE, used") == f"key {HIDDEN}, used"


@pytest.mark.parametrize(
    "text",
    [
        "[INFO] Total Weights Memory: 1472 bytes",
        "tokens per second: 4211; token_type_ids: int64[batch,16]",
        "https://onnx.ai/operators?x=1 and mail@example.com",
        "key: cpu fp32 onnxruntime, sha256:" + "ab" * 32,
        "node /layer.0/attention/self/query/MatMul: 3.1 ms",
    ],
)
def test_ordinary_output_stays(text: str) -> None:
    assert PLAIN(text) == text


def test_values_of_environment_variables_are_hidden_everywhere() -> None:
    scrub = scrubber(
        {
            "MY_TOKEN": SECRET,
            "DB_PASSWORD": "s3cretword",
            "HTTPS_PROXY": "http://user:proxyword@proxy:1",
            "TOKENIZERS_PARALLELISM": "sequential",
            "SSH_AUTH_SOCK": "/run/agent.sock",
            "ENGINESMITH_SIGNING_KEY": "/keys/signing.pem",
            "SHORT_SECRET": "yes",
        }
    )
    assert scrub(f"x{SECRET}y s3cretword proxyword") == f"x{HIDDEN}y {HIDDEN} {HIDDEN}"
    assert (
        scrub("sequential /run/agent.sock /keys/signing.pem yes") == "sequential /run/agent.sock /keys/signing.pem yes"
    )


def test_a_long_log_is_scrubbed_in_linear_time() -> None:
    hostile_text = ("secret_" * 40 + "a://" * 40 + "eyJ" + "A" * 400 + "\n") * 40
    start_s = time.process_time()
    PLAIN(hostile_text)
    one_pass_s = time.process_time() - start_s
    start_s = time.process_time()
    PLAIN(hostile_text * 8)
    assert time.process_time() - start_s < max(8 * 4 * one_pass_s, 2.0)
