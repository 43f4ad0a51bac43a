"""Secrets and the ledger's address: made here on one machine, required on a cluster, never a template's placeholder."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import quote

import pytest

from deployments.model import Model
from serve_app import secret_files
from serve_app.launch.driver import driver_environment
from serve_app.launch.preflight import free_port
from serve_app.settings import GatewayArgs, SettingsError
from serve_app.storage.sealing import SecretKeys

GOOD = "b3BlbnNzbCByYW5kIC1iYXNlNjQgMzI="
GOOD_SECRET = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM="
DATABASE = "postgresql+psycopg://serve:secret@db.internal:5432/ledger"
VARIABLES = ("SERVE_APP_OPERATOR_KEY", "SERVE_APP_SECRET_KEY", "SERVE_APP_DATABASE_URL")


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a cluster's gateway pod with all that it needs."""
    monkeypatch.delenv("SERVE_APP_LOCAL_STATE", raising=False)
    for variable, value in zip(VARIABLES, (GOOD, GOOD_SECRET, DATABASE), strict=True):
        monkeypatch.setenv(variable, value)
    for variable in (*secret_files._VARIABLES, "RAY_AUTH_TOKEN", "PGPASSWORD"):
        if variable not in VARIABLES:
            monkeypatch.delenv(variable, raising=False)


def load(home: Path) -> None:
    GatewayArgs(home=home).ledger_url()
    secret_files.load_secrets(home)


def test_a_complete_environment_is_accepted(tmp_path: Path) -> None:
    load(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", [None, "", "  "])
def test_what_is_missing_on_a_cluster_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^{variable}: not set; .*SERVE_APP_LOCAL_STATE=1"):
        load(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["REPLACE_ME", "change-me", "replace-me-with-something-long", "ChangeMe123456789"])
@pytest.mark.parametrize("local", ["0", "1"])
def test_a_placeholder_is_refused_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, local: str
) -> None:
    monkeypatch.setenv("SERVE_APP_LOCAL_STATE", local)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^{variable}: still the placeholder"):
        load(tmp_path)


@pytest.mark.parametrize("variable", VARIABLES[:2])
def test_a_short_secret_is_refused_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "hunter2")
    with pytest.raises(SettingsError, match=f"^{variable}: only 7 characters") as refused:
        load(tmp_path)
    assert "hunter2" not in str(refused.value)
    monkeypatch.setenv(variable, "x" * secret_files.MIN_LENGTH)
    load(tmp_path)


def test_an_empty_file_is_refused_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_LOCAL_STATE", "1")
    monkeypatch.delenv("SERVE_APP_OPERATOR_KEY")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "operator-key").write_text("\n")
    with pytest.raises(SettingsError, match="secrets/operator-key: only 0 characters"):
        load(tmp_path)


def test_under_the_launcher_secrets_and_ledger_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable)
    for variable, value in driver_environment(tmp_path, tmp_path, free_port()).items():
        monkeypatch.setenv(variable, value)
    made = secret_files.load_secrets(tmp_path)
    again = secret_files.load_secrets(tmp_path)
    assert (made.operator_key, made.secret_keys) == (again.operator_key, again.secret_keys)
    assert GatewayArgs().ledger_url() == f"sqlite:///{tmp_path / 'ledger.db'}"


PREVIOUS = "SERVE_APP_OPERATOR_KEY_PREVIOUS"


def test_an_operator_key_and_the_one_before_are_both_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret_files.load_secrets(tmp_path).operator_keys == (GOOD,)
    monkeypatch.setenv(PREVIOUS, "the key of last year, which is long")
    assert secret_files.load_secrets(tmp_path).operator_keys == (GOOD, "the key of last year, which is long")
    monkeypatch.setenv(PREVIOUS, "")
    assert secret_files.load_secrets(tmp_path).operator_keys == (GOOD,)


def test_on_one_machine_the_key_before_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = tmp_path / "secrets" / "operator-key.previous"
    former.parent.mkdir()
    former.write_text("the key of last year, which is long\n")
    assert secret_files.load_secrets(tmp_path).operator_keys == (GOOD,)  # on a cluster a node has no files of its own
    monkeypatch.setenv("SERVE_APP_LOCAL_STATE", "1")
    assert secret_files.load_secrets(tmp_path).operator_keys == (GOOD, "the key of last year, which is long")
    former.write_text("\n")
    with pytest.raises(SettingsError, match=r"operator-key\.previous: empty"):
        load(tmp_path)


@pytest.mark.parametrize("value", ["REPLACE_ME_REPLACE_ME", "hunter2"])
def test_a_key_before_that_anybody_could_guess_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(PREVIOUS, value)
    with pytest.raises(SettingsError, match=f"^{PREVIOUS}: ") as refused:
        load(tmp_path)
    assert value not in str(refused.value)


async def test_a_model_replica_forgets_the_secrets_of_its_machine_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forgotten(Exception):
        pass

    forget = secret_files.forget_environment

    def forget_and_stop() -> None:
        forget()
        raise Forgotten

    monkeypatch.setattr(secret_files, "forget_environment", forget_and_stop)
    monkeypatch.setenv(PREVIOUS, GOOD)
    with pytest.raises(Forgotten):
        await Model.func_or_class.__init__(MagicMock(), None)
    assert [variable for variable in (*VARIABLES, PREVIOUS) if variable in os.environ] == []


FORMER = "the secret of last year, which is long"


def test_a_secret_key_and_the_one_before_are_both_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret_files.load_secrets(tmp_path).secret_keys == SecretKeys(GOOD_SECRET.encode())
    monkeypatch.setenv("SERVE_APP_SECRET_KEY_PREVIOUS", FORMER)
    loaded = secret_files.load_secrets(tmp_path)
    assert loaded.secret_keys.valid == (GOOD_SECRET.encode(), FORMER.encode())
    assert FORMER not in repr((loaded, loaded.secret_keys))


def test_on_one_machine_the_secret_key_before_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = tmp_path / "secrets" / "secret-key.previous"
    former.parent.mkdir()
    former.write_text(f"{FORMER}\n")
    assert secret_files.load_secrets(tmp_path).secret_keys.previous == b""
    monkeypatch.setenv("SERVE_APP_LOCAL_STATE", "1")
    assert secret_files.load_secrets(tmp_path).secret_keys.previous == FORMER.encode()


@pytest.mark.parametrize("value", ["REPLACE_ME_REPLACE_ME", "hunter2", GOOD_SECRET])
def test_a_secret_key_before_that_can_not_be_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SERVE_APP_SECRET_KEY_PREVIOUS", value)
    with pytest.raises(SettingsError, match="SERVE_APP_SECRET_KEY_PREVIOUS"):
        load(tmp_path)


def test_the_environment_forgets_both_secret_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_SECRET_KEY_PREVIOUS", FORMER)
    secret_files.forget_environment()
    assert not {"SERVE_APP_SECRET_KEY", "SERVE_APP_SECRET_KEY_PREVIOUS"} & set(os.environ)


SECRETS = (
    "SERVE_APP_OPERATOR_KEY", "SERVE_APP_OPERATOR_KEY_PREVIOUS", "SERVE_APP_SECRET_KEY",
    "SERVE_APP_SECRET_KEY_PREVIOUS", "SERVE_APP_STRIPE_KEY", "SERVE_APP_STRIPE_WEBHOOK_SECRET",
    "SERVE_APP_SMTP_PASSWORD", "SERVE_APP_OIDC_SECRET", "RAY_AUTH_TOKEN", "PGPASSWORD",
)  # fmt: skip


@pytest.mark.parametrize(("first", "second"), itertools.combinations(SECRETS, 2))
def test_two_secrets_never_have_one_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    for variable in SECRETS:
        monkeypatch.setenv(variable, f"a long value of {variable} alone")
    load(tmp_path)
    monkeypatch.setenv(first, "one long value for two purposes")
    monkeypatch.setenv(second, "one long value for two purposes")
    with pytest.raises(SettingsError, match=f"^{first} and {second}, .*the same value") as refused:
        load(tmp_path)
    assert "two purposes" not in str(refused.value)


def test_the_databases_password_is_no_other_secret_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_DATABASE_URL", f"postgresql+psycopg://serve:{quote(GOOD, safe='')}@db/ledger")
    with pytest.raises(SettingsError, match=r"SERVE_APP_OPERATOR_KEY and the password in SERVE_APP_DATABASE_URL"):
        load(tmp_path)
    monkeypatch.setenv("SERVE_APP_DATABASE_URL", DATABASE)
    monkeypatch.setenv("PGPASSWORD", "secret")  # the same database's
    load(tmp_path)


def test_files_with_one_value_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_APP_LOCAL_STATE", "1")
    for variable in VARIABLES[:2]:
        monkeypatch.delenv(variable)
    secret_files.secret_file(tmp_path, "operator-key", GOOD)
    secret_files.secret_file(tmp_path, "secret-key", GOOD)
    with pytest.raises(SettingsError, match="SERVE_APP_OPERATOR_KEY and SERVE_APP_SECRET_KEY, or their files"):
        load(tmp_path)
