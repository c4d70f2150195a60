# SPDX-License-Identifier: Apache-2.0
from aliquot_lab.demo.metrics import DeviceMemory, Share, parse

TEXT = """\
# HELP aliquot_device_memory_total_bytes t
# TYPE aliquot_device_memory_total_bytes gauge
aliquot_device_memory_total_bytes{device_uuid="GPU-0",model="A"} 8.5e+10
# TYPE aliquot_device_memory_allocated_bytes gauge
aliquot_device_memory_allocated_bytes{device_uuid="GPU-0",model="A"} 3.0
# TYPE aliquot_container_memory_limit_bytes gauge
aliquot_container_memory_limit_bytes{container="cuda",device_uuid="GPU-0",namespace="default",pod="train"} 2.147483648e+010
aliquot_container_memory_limit_bytes{container="cuda",device_uuid="MIG-0",namespace="default",pod="mig"} 1.0
# TYPE aliquot_container_memory_used_bytes gauge
aliquot_container_memory_used_bytes{container="cuda",device_uuid="GPU-0",namespace="default",pod="train"} 5.0
# TYPE aliquot_container_refusals counter
aliquot_container_refusals_total{container="cuda",device_uuid="GPU-0",namespace="default",pod="train"} 2.0
"""


def test_shares_and_devices_are_parsed():
    scrape = parse(TEXT)
    assert scrape.of("train") == (Share("train", "cuda", "GPU-0", 21474836480, 5, 2),)
    assert scrape.devices == {"GPU-0": DeviceMemory(85_000_000_000, None, 3)}
    assert scrape.text == TEXT


def test_value_not_counted_by_agent_is_none_and_not_zero():
    (mig,) = parse(TEXT).of("mig")
    assert (mig.used_bytes, mig.refusals) == (None, None)
