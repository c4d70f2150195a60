from agent.core.inventory import FailedDevice
from agent.errors import DriverError, DriverMissingError, DriverTimeoutError
from agent.services.driver_watch import RESTART_EVERY_POLLS, DriverWatch
from tests.unit.agent.builders import gpu, reading
from tests.unit.agent.fakes import FakeDriver

BOTH = reading(gpu(0), gpu(1))
ONE_LOST = reading(gpu(0), failed=(FailedDevice(1, "GPU-1", "GPU is lost"),))


async def polled(driver: FakeDriver, *answers) -> DriverWatch:
    watch = DriverWatch(driver, 1.0)
    for answer in answers:
        driver.answer = answer
        await watch.poll()
    return watch


def health(watch: DriverWatch) -> dict[str, bool]:
    return {entry.device.uuid: entry.healthy for entry in watch.board.devices}


async def test_devices_and_links_are_on_the_board_after_the_first_reading():
    driver = FakeDriver(BOTH)
    watch = await polled(driver, BOTH, BOTH)
    assert health(watch) == {"GPU-0": True, "GPU-1": True}
    assert driver.link_reads == 1
    assert watch.trouble == ""


async def test_a_missing_driver_is_waited_for_and_then_found(caplog):
    missing = DriverMissingError("libnvidia-ml.so.1 was not found")
    watch = await polled(FakeDriver(missing), missing, missing, BOTH)
    assert len(watch.board.devices) == 2
    assert len([record for record in caplog.records if "libnvidia-ml" in record.getMessage()]) == 1


async def test_a_lost_device_becomes_unhealthy_and_recovers_by_itself():
    driver = FakeDriver(BOTH)
    watch = await polled(driver, BOTH, ONE_LOST)
    assert health(watch) == {"GPU-0": True, "GPU-1": False}
    driver.answer = BOTH
    await watch.poll()
    assert health(watch) == {"GPU-0": True, "GPU-1": True}


async def test_while_a_device_is_lost_the_driver_is_entered_anew_now_and_then():
    driver = FakeDriver(BOTH)
    await polled(driver, BOTH, *[ONE_LOST] * RESTART_EVERY_POLLS)
    assert driver.restarts == 1


async def test_a_hung_device_is_marked_and_the_others_are_left():
    driver = FakeDriver(BOTH)
    driver.hung = "GPU-1"
    watch = await polled(driver, BOTH, DriverTimeoutError("nvmlDeviceGetMemoryInfo has not returned for 6.0 s"))
    assert health(watch) == {"GPU-0": True, "GPU-1": False}


async def test_a_driver_that_hangs_as_a_whole_marks_every_device():
    watch = await polled(FakeDriver(BOTH), BOTH, DriverTimeoutError("nvmlInit has not returned for 6.0 s"))
    assert not any(health(watch).values())


async def test_a_hang_is_logged_once_however_long_it_lasts(caplog):
    hangs = [DriverTimeoutError(f"nvmlInit has not returned for {seconds}.0 s") for seconds in range(5, 9)]
    await polled(FakeDriver(BOTH), BOTH, *hangs)
    assert len([record for record in caplog.records if "nvmlInit" in record.getMessage() and record.name.endswith("driver_watch")]) == 3
    # one line for the driver, one for each of the two devices


async def test_listeners_hear_of_changes_of_health_and_of_nothing_else():
    driver = FakeDriver(BOTH)
    watch = await polled(driver, BOTH)
    before = watch.changes.count
    for answer in (reading(gpu(0), gpu(1), used_mib=500), BOTH):
        driver.answer = answer
        await watch.poll()
    assert watch.changes.count == before
    assert watch.board.devices[0].memory_used_bytes == 0
    driver.answer = DriverError("unknown error")
    await watch.poll()
    assert watch.changes.count == before + 1


async def test_trouble_with_the_links_alone_leaves_the_devices_healthy():
    class NoLinks(FakeDriver):
        async def links(self):
            raise DriverError("NVLink state: unknown error")

    assert health(await polled(NoLinks(BOTH), BOTH)) == {"GPU-0": True, "GPU-1": True}
