# SPDX-License-Identifier: Apache-2.0
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from scheduler_plugin.adapters.authority import WebhookAuthority
from scheduler_plugin.adapters.serving_context import ServingContext
from scheduler_plugin.core.certificate import Step, host_names
from scheduler_plugin.errors import CertificateError

DAY = 86400.0
NOW = 1_800_000_000.0
NAMES = host_names("aliquot-system")
AUTHORITY = WebhookAuthority()


@pytest.fixture
def made() -> dict[str, bytes]:
    return AUTHORITY.carry_out(Step.START_AFRESH, {}, NAMES, NOW)


def test_what_is_made_can_be_used_for_90_days_and_ten_years(made):
    held = AUTHORITY.inspect(made)
    assert held.flaws == ()
    assert held.names == {"aliquot-webhook.aliquot-system.svc", "aliquot-webhook.aliquot-system.svc.cluster.local"}
    assert (held.certificate.ends_at, held.authority.ends_at) == (NOW + 90 * DAY, NOW + 3650 * DAY)
    assert AUTHORITY.ends_at(made) == NOW + 90 * DAY
    certificate = x509.load_pem_x509_certificate(made["tls.crt"])
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_new_authority_is_put_in_front_and_the_certificate_stays(made):
    renewed = AUTHORITY.carry_out(Step.RENEW_AUTHORITY, made, NAMES, NOW + DAY)
    assert renewed["ca.crt"].endswith(made["ca.crt"])
    assert (renewed["tls.crt"], renewed["tls.key"]) == (made["tls.crt"], made["tls.key"])
    assert AUTHORITY.inspect(renewed).flaws == ()
    signed = AUTHORITY.carry_out(Step.RENEW_CERTIFICATE, renewed, NAMES, NOW + DAY)
    x509.load_pem_x509_certificate(signed["tls.crt"]).verify_directly_issued_by(x509.load_pem_x509_certificate(renewed["ca.crt"]))


def test_an_authority_that_has_ended_is_trusted_no_longer(made):
    later = AUTHORITY.carry_out(Step.START_AFRESH, made, NAMES, NOW + 4000 * DAY)
    assert len(x509.load_pem_x509_certificates(later["ca.crt"])) == 1


@pytest.mark.parametrize("broken", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
def test_each_broken_part_is_named_and_no_longer_counts(made, broken):
    held = AUTHORITY.inspect(made | {broken: b"rubbish"})
    assert any(broken in flaw for flaw in held.flaws)
    assert (held.authority is None) is broken.startswith("ca.")
    assert (held.certificate is None) is (broken != "ca.key")


@pytest.mark.parametrize(
    ("parts", "flaw"),
    [
        (["ca.key"], "ca.key is not the key of the first certificate in ca.crt"),
        (["tls.key"], "tls.key is not the key of tls.crt"),
        (["tls.crt", "tls.key"], "tls.crt was not signed by any certificate in ca.crt"),
    ],
)
def test_parts_that_do_not_belong_together_are_found(made, parts, flaw):
    other = AUTHORITY.carry_out(Step.START_AFRESH, {}, NAMES, NOW)
    assert AUTHORITY.inspect(made | {part: other[part] for part in parts}).flaws == (flaw,)


def test_no_certificate_outlives_its_authority(made):
    late = NOW + 3640 * DAY
    renewed = AUTHORITY.carry_out(Step.RENEW_CERTIFICATE, made, NAMES, late)
    assert AUTHORITY.ends_at(renewed) == AUTHORITY.inspect(made).authority.ends_at


def test_what_cannot_be_served_is_an_error_of_ours(made):
    serving = ServingContext()
    serving.serve(made["tls.crt"], made["tls.key"])
    assert isinstance(serving.context, ssl.SSLContext)
    with pytest.raises(CertificateError, match="cannot serve the certificate"):
        serving.serve(made["tls.crt"], b"rubbish")
