/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the pids that NVML names are the container's: over a region as shims and agent write it, and lists as drivers give them. */
#define _GNU_SOURCE /* F_OFD_SETLK */

#include <fcntl.h>
#include <unistd.h>

#include "interpose/naming.h"
#include "tests/support.h"

#define DEVICE 1u

static struct aq_region region;
static struct aq_listed listed;
static int processes_fd; /* holds the liveness locks of all processes, and no lock by which the kernel would name them */

static void lock_life(uint32_t slot, short type)
{
	off_t at = (char *)aq_region_slot(&region, slot) - (char *)region.base;
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1 };

	CHECK(fcntl(processes_fd, F_OFD_SETLK, &lock) == 0);
}

/* A process of the container: its pid there, the one the agent found for it, and its contexts on the device. */
static void process(uint32_t slot, uint32_t pid, uint32_t host_pid, uint32_t contexts)
{
	struct aq_region_slot *at = aq_region_slot(&region, slot);

	atomic_store(&at->state, AQ_SLOT_LIVE);
	atomic_store(&at->pid, pid);
	atomic_store(&at->host_pid, host_pid);
	atomic_store(&at->device[DEVICE].contexts, contexts);
	lock_life(slot, F_WRLCK);
}

static void killed(uint32_t slot)
{
	lock_life(slot, F_UNLCK);
}

static void lists(unsigned int count, const unsigned int *pids)
{
	listed.known = true;
	listed.count = count;
	for (unsigned int i = 0; i < count; i++)
		listed.process[i].pid = pids[i];
}

#define LISTS(...) lists(sizeof((unsigned int[]){ __VA_ARGS__ }) / sizeof(unsigned int), (unsigned int[]){ __VA_ARGS__ })

static int slot_of(unsigned int pid)
{
	struct aq_naming naming;

	aq_naming_learn(&naming, &region, DEVICE, &listed);
	return aq_naming_slot(&naming, pid);
}

static void a_driver_that_translates_is_understood(void)
{
	process(0, 7, 4007, 1);
	LISTS(7);
	CHECK(slot_of(7) == 0);
	CHECK(slot_of(4007) == -1);
}

static void a_driver_that_names_host_pids_is_understood(void)
{
	process(0, 7, 4007, 1);
	LISTS(4007, 9);
	CHECK(slot_of(4007) == 0);
	CHECK(slot_of(7) == -1);
}

static void neighbour_with_a_container_pid_is_not_the_containers(void)
{
	process(0, 7, 4007, 1);
	LISTS(4007, 7); /* host pids: the neighbour is 7 */
	CHECK(slot_of(7) == -1);
	CHECK(slot_of(4007) == 0);
	process(1, 8, 4008, 0);
	LISTS(7); /* translated: 8 in the samples is a neighbour, for the container's 8 is not on the device */
	CHECK(slot_of(7) == 0);
	CHECK(slot_of(8) == -1);
	process(0, 7, 4007, 0);
	LISTS(7, 8); /* host pids: no process of the container is on the device */
	CHECK(slot_of(7) == -1);
	CHECK(slot_of(8) == -1);
}

static void container_pids_that_equal_other_host_pids_are_distinguished(void)
{
	process(0, 7, 20, 1);
	process(1, 20, 30, 1);
	LISTS(7, 20);
	CHECK(slot_of(7) == 0);
	CHECK(slot_of(20) == 1);
	LISTS(20, 30);
	CHECK(slot_of(20) == 0);
	CHECK(slot_of(30) == 1);
	CHECK(slot_of(7) == -1);
}

static void without_the_agent_the_namespaces_may_be_the_same(void)
{
	process(0, 7, 0, 1);
	LISTS(7);
	CHECK(slot_of(7) == 0);
	LISTS(9);
	CHECK(slot_of(7) == -1);
}

static void without_a_list_the_host_pid_is_believed(void)
{
	process(0, 7, 4007, 1);
	process(1, 8, 0, 1);
	listed.known = false;
	CHECK(slot_of(4007) == 0);
	CHECK(slot_of(7) == -1);
	CHECK(slot_of(8) == 1);
}

static void process_with_its_first_context_finds_its_own_pid(void)
{
	process(0, 7, 4007, 0);
	region.slot_index = 0;
	LISTS(7);
	CHECK(slot_of(7) == 0);
}

#define UNSEEN 0 /* the pid of a process in a namespace that the caller cannot look into */

static void invisible_process_has_a_host_pid_only_in_samples(void)
{
	process(0, 7, 4007, 1);
	process(1, UNSEEN, 4008, 1);
	process(2, UNSEEN, 0, 1);
	LISTS(7); /* translated, without those that are not visible */
	CHECK(slot_of(7) == 0);
	CHECK(slot_of(4008) == 1);
	CHECK(slot_of(4007) == -1);
	CHECK(slot_of(UNSEEN) == -1);
	process(3, 4008, 4009, 1);
	LISTS(7, 4008); /* listed, so it is the pid of one that can be seen */
	CHECK(slot_of(4008) == 3);
}

static void killed_process_matches_no_slot(void)
{
	process(0, 7, 0, 1);
	process(1, 7, 0, 1); /* the first had that pid in a namespace within */
	killed(0);
	LISTS(7);
	CHECK(slot_of(7) == 1);
	killed(1);
	CHECK(slot_of(7) == -1);
}

/* ---- the driver's two lists ------------------------------------------------------------------------------------ */

static nvmlReturn_t answer(unsigned int *count, nvmlProcessInfo_v2_t *processes, unsigned int first, unsigned int many)
{
	unsigned int room = *count;

	*count = many;
	for (unsigned int i = 0; i < many && many <= room; i++)
		processes[i] = (nvmlProcessInfo_v2_t){ .pid = first + i, .usedGpuMemory = (first + i) * MIB };
	return many <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t seven_and_eight(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes)
{
	(void)device;
	return answer(count, processes, 7, 2);
}

static nvmlReturn_t eight_and_nine(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes)
{
	(void)device;
	return answer(count, processes, 8, 2);
}

static nvmlReturn_t too_many(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes)
{
	(void)device;
	return answer(count, processes, 1, AQ_LISTED_MAX + 1);
}

static void mps_client_is_listed_once_from_any_list(void)
{
	aq_listed_query(&listed, NULL, seven_and_eight, eight_and_nine);
	CHECK(listed.known && listed.count == 3);
	for (unsigned int i = 0; i < 3; i++)
		CHECK(listed.process[i].pid == 7 + i && listed.process[i].usedGpuMemory == (7 + i) * MIB);
	CHECK(listed.as[0] == AQ_LISTED_COMPUTE && listed.as[1] == (AQ_LISTED_COMPUTE | AQ_LISTED_MPS) && listed.as[2] == AQ_LISTED_MPS);
	process(0, 9, 0, 1);
	CHECK(slot_of(9) == 0);
}

static void without_a_list_of_mps_that_of_compute_is_all(void)
{
	aq_listed_query(&listed, NULL, seven_and_eight, NULL);
	CHECK(listed.known && listed.count == 2);
	aq_listed_query(&listed, NULL, seven_and_eight, too_many);
	CHECK(listed.known && listed.count == 2);
}

static void without_the_list_of_compute_nothing_is_known(void)
{
	aq_listed_query(&listed, NULL, NULL, eight_and_nine);
	CHECK(!listed.known && listed.count == 0);
	aq_listed_query(&listed, NULL, too_many, eight_and_nine);
	CHECK(!listed.known && listed.count == 0);
}

/* Process 1 has ended in that pid namespace; the caller has slot 0. */
static uint32_t name_of_ended(uint64_t namespace, uint32_t host_pid)
{
	struct aq_naming naming;

	region.slot_index = 0;
	atomic_store(&aq_region_slot(&region, 0)->pid_namespace, 5);
	atomic_store(&aq_region_slot(&region, 1)->pid, 8);
	atomic_store(&aq_region_slot(&region, 1)->host_pid, host_pid);
	atomic_store(&aq_region_slot(&region, 1)->pid_namespace, namespace);
	aq_naming_learn(&naming, &region, DEVICE, &listed);
	return aq_naming_ended(&naming, &region, 1);
}

static void ended_process_has_its_pid_where_the_driver_translates(void)
{
	process(0, 7, 4007, 1);
	LISTS(7);
	CHECK(name_of_ended(5, 4008) == 8 && name_of_ended(5, 0) == 8);
	CHECK(name_of_ended(6, 4008) == 0 && name_of_ended(0, 4008) == 0); /* its pid is another process's here */
}

static void ended_process_has_its_host_pid_where_the_driver_does_not(void)
{
	process(0, 7, 4007, 1);
	LISTS(4007);
	CHECK(name_of_ended(5, 4008) == 4008 && name_of_ended(6, 4008) == 4008);
	CHECK(name_of_ended(5, 0) == 0);
}

int main(void)
{
	static void (*const tests[])(void) = {
		a_driver_that_translates_is_understood,
		a_driver_that_names_host_pids_is_understood,
		neighbour_with_a_container_pid_is_not_the_containers,
		container_pids_that_equal_other_host_pids_are_distinguished,
		without_the_agent_the_namespaces_may_be_the_same,
		without_a_list_the_host_pid_is_believed,
		process_with_its_first_context_finds_its_own_pid,
		invisible_process_has_a_host_pid_only_in_samples,
		killed_process_matches_no_slot,
		ended_process_has_its_pid_where_the_driver_translates,
		ended_process_has_its_host_pid_where_the_driver_does_not,
		mps_client_is_listed_once_from_any_list,
		without_a_list_of_mps_that_of_compute_is_all,
		without_the_list_of_compute_nothing_is_known,
	};

	for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
		struct aq_fault fault;

		support_directory();
		support_write_region();
		CHECK(aq_region_map(&region, support_region(), AQ_REGION_WRITE, &fault) == 0);
		CHECK((processes_fd = open(support_region(), O_RDWR | O_CLOEXEC)) >= 0);
		tests[i]();
		close(processes_fd);
		aq_region_unmap(&region);
		support_remove();
	}
	return 0;
}
