# SPDX-License-Identifier: Apache-2.0
import pytest

from scheduler_plugin.core.certificate import Holdings, Span, Step, check_ownership, host_names, next_step
from scheduler_plugin.errors import CertificateError

DAY = 86400.0
NAMES = host_names("aliquot-system")
YOUNG, LAST_THIRD = Span(0, 90 * DAY), Span(-60 * DAY, 30 * DAY)
AUTHORITY, OLD_AUTHORITY, DEAD = Span(0, 3650 * DAY), Span(-2500 * DAY, 1150 * DAY), Span(-9 * DAY, -1 * DAY)


def held(authority: Span | None = AUTHORITY, certificate: Span | None = YOUNG, names: tuple[str, ...] = NAMES) -> Holdings:
    return Holdings(authority, certificate, frozenset(names))


@pytest.mark.parametrize(
    ("holdings", "step"),
    [
        pytest.param(Holdings(), Step.START_AFRESH, id="nothing"),
        pytest.param(held(), Step.KEEP, id="young"),
        pytest.param(held(certificate=LAST_THIRD), Step.RENEW_CERTIFICATE, id="a third left"),
        pytest.param(held(certificate=DEAD), Step.RENEW_CERTIFICATE, id="ended"),
        pytest.param(held(certificate=None), Step.RENEW_CERTIFICATE, id="broken certificate"),
        pytest.param(held(names=host_names("elsewhere")), Step.RENEW_CERTIFICATE, id="another namespace"),
        pytest.param(held(authority=None), Step.START_AFRESH, id="broken authority"),
        pytest.param(held(authority=DEAD), Step.START_AFRESH, id="dead authority"),
        pytest.param(held(authority=OLD_AUTHORITY), Step.RENEW_AUTHORITY, id="old authority"),
    ],
)
def test_what_is_to_be_done_follows_from_what_is_kept(holdings, step):
    assert next_step(holdings, NAMES, now=0) is step


def test_a_new_authority_signs_nothing_until_the_next_renewal():
    assert next_step(held(OLD_AUTHORITY, LAST_THIRD), NAMES, now=0) is Step.RENEW_CERTIFICATE
    assert next_step(held(OLD_AUTHORITY, YOUNG), NAMES, now=0) is Step.RENEW_AUTHORITY


@pytest.mark.parametrize(("now", "due"), [(59 * DAY, False), (60 * DAY, True)])
def test_a_certificate_is_due_when_a_third_of_its_life_is_left(now, due):
    assert YOUNG.due(now) is due


@pytest.mark.parametrize(("now", "serves"), [(90 * DAY - 1, True), (90 * DAY, False)])
def test_a_certificate_serves_until_it_ends(now, serves):
    assert held().serves(now) is serves


def test_an_empty_secret_is_filled_and_one_of_somebody_else_is_not():
    check_ownership({})
    check_ownership(dict.fromkeys(("ca.crt", "ca.key", "tls.crt", "tls.key"), b"broken"))
    with pytest.raises(
        CertificateError, match=r"has the keys tls\.crt, tls\.key, expected ca\.crt.*set webhookCertificateSecret to another"
    ):
        check_ownership({"tls.crt": b"", "tls.key": b""})
