/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_threads.c - many threads and many processes at once: no memory is lost or granted twice, and no process waits for a dead
 * one. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_driver/tests/harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define THREADS 6

static CUcontext shared_context;

static void run_threads(void *(*body)(void *))
{
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK_EQUAL(pthread_create(&threads[i], NULL, body, (void *)i), 0);
	for (size_t i = 0; i < THREADS; i++)
		CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
}

static size_t random_size(unsigned *seed)
{
	unsigned magnitude = 4 + (unsigned)rand_r(seed) % 20;
	return 1 + (size_t)rand_r(seed) % (1u << magnitude);
}

/* ---- threads of one process ------------------------------------------------------------------------------------------ */

static void *allocate_and_check(void *number)
{
	unsigned seed = (unsigned)(uintptr_t)number + 1;
	CUdeviceptr pointers[32] = { 0 };
	size_t sizes[32];
	OK(cuCtxSetCurrent(shared_context));
	for (int round = 0; round < 3000; round++) {
		size_t i = (size_t)rand_r(&seed) % COUNT(pointers);
		uint8_t first = 0, last = 0;
		if (!pointers[i]) {
			sizes[i] = random_size(&seed);
			OK(cuMemAlloc_v2(&pointers[i], sizes[i]));
			OK(cuMemsetD8_v2_ptds(pointers[i], (unsigned char)(i + seed % 2), sizes[i] < 4096 ? sizes[i] : 4096));
			OK(cuMemsetD8_v2_ptds(pointers[i] + sizes[i] - 1, (unsigned char)i, 1));
			OK(cuMemsetD8_v2_ptds(pointers[i], (unsigned char)i, 1));
			continue;
		}
		OK(cuMemcpyDtoH_v2_ptds(&first, pointers[i], 1));
		OK(cuMemcpyDtoH_v2_ptds(&last, pointers[i] + sizes[i] - 1, 1));
		CHECK(first == i && last == i);
		OK(cuMemFree_v2(pointers[i]));
		pointers[i] = 0;
	}
	for (size_t i = 0; i < COUNT(pointers); i++)
		if (pointers[i])
			OK(cuMemFree_v2(pointers[i]));
	return NULL;
}

static void threads_get_separate_memory_and_lose_none(void)
{
	shared_context = test_context(0);
	uint64_t before = test_used(0);
	run_threads(allocate_and_check);
	CHECK_EQUAL(test_used(0), before);
}

static CUfunction shared_spin;

static void *launch_and_wait(void *number)
{
	CUstream stream;
	CUevent mark;
	unsigned seed = (unsigned)(uintptr_t)number + 1;
	OK(cuCtxSetCurrent(shared_context));
	OK(cuStreamCreate(&stream, rand_r(&seed) % 2 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
	OK(cuEventCreate(&mark, CU_EVENT_DEFAULT));
	for (int round = 0; round < 200; round++) {
		for (int i = 0; i < 8; i++)
			OK(test_launch(shared_spin, (uint64_t)rand_r(&seed) % 10, i % 4 ? stream : NULL));
		OK(cuEventRecord(mark, stream));
		OK(cuStreamWaitEvent(NULL, mark, 0));
		if (round % 3 == 0)
			OK(cuEventSynchronize(mark));
		if (round % 7 == 0)
			OK(cuStreamSynchronize(stream));
	}
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(cuStreamQuery(stream), CUDA_SUCCESS);
	OK(cuEventDestroy_v2(mark));
	OK(cuStreamDestroy_v2(stream));
	return NULL;
}

static void threads_launch_on_their_own_and_shared_streams(void)
{
	shared_context = test_context(0);
	shared_spin = test_spin();
	run_threads(launch_and_wait);
	OK(cuCtxSynchronize());
}

static void *use_pools(void *number)
{
	CUstream stream;
	unsigned seed = (unsigned)(uintptr_t)number + 1;
	OK(cuCtxSetCurrent(shared_context));
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	for (int round = 0; round < 300; round++) {
		CUdeviceptr pointers[4];
		for (size_t i = 0; i < COUNT(pointers); i++) {
			OK(cuMemAllocAsync(&pointers[i], random_size(&seed) * 4, stream));
			OK(cuMemsetD8Async(pointers[i], (unsigned char)i, 4, stream));
		}
		for (size_t i = 0; i < COUNT(pointers); i++)
			OK(cuMemFreeAsync(pointers[i], stream));
		if (round % 16 == 0)
			OK(cuStreamSynchronize(stream));
	}
	OK(cuStreamSynchronize(stream));
	OK(cuStreamDestroy_v2(stream));
	return NULL;
}

static void threads_share_a_pool(void)
{
	CUmemoryPool pool;
	cuuint64_t used;
	shared_context = test_context(0);
	uint64_t before = test_used(0);
	run_threads(use_pools);
	OK(cuCtxSynchronize());
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
	CHECK_EQUAL(used, 0);
	CHECK_EQUAL(test_used(0), before);
}

static void *map_and_unmap(void *number)
{
	CUmemAllocationProp properties = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUdeviceptr range;
	(void)number;
	OK(cuCtxSetCurrent(shared_context));
	OK(cuMemAddressReserve(&range, 64 * MIB, 0, 0, 0));
	for (int round = 0; round < 100; round++) {
		CUmemGenericAllocationHandle handle;
		size_t bytes = (1 + (size_t)round % 4) * 2 * MIB;
		OK(cuMemCreate(&handle, bytes, &properties, 0));
		OK(cuMemMap(range, bytes, 0, handle, 0));
		OK(cuMemRelease(handle));
		OK(cuMemSetAccess(range, bytes, &access, 1));
		OK(cuMemsetD8_v2_ptds(range + bytes - 1, 1, 1));
		OK(cuMemUnmap(range, bytes));
	}
	OK(cuMemAddressFree(range, 64 * MIB));
	return NULL;
}

static void threads_map_and_unmap(void)
{
	shared_context = test_context(0);
	uint64_t before = test_used(0);
	run_threads(map_and_unmap);
	CHECK_EQUAL(test_used(0), before);
}

static void *make_contexts(void *number)
{
	(void)number;
	for (int round = 0; round < 30; round++) {
		CUcontext primary, own, popped;
		CUdeviceptr pointer;
		OK(cuDevicePrimaryCtxRetain(&primary, 1));
		OK(cuCtxCreate_v2(&own, 0, 0));
		OK(cuMemAlloc_v2(&pointer, 100000));
		OK(cuCtxPushCurrent_v2(primary));
		OK(cuMemAlloc_v2(&pointer, 1000));
		OK(cuMemFree_v2(pointer));
		OK(cuCtxPopCurrent_v2(&popped));
		CHECK(popped == primary);
		OK(cuCtxDestroy_v2(own));
		OK(cuDevicePrimaryCtxRelease_v2(1));
	}
	return NULL;
}

static void threads_make_and_end_contexts(void)
{
	OK(cuInit(0));
	run_threads(make_contexts);
	CHECK_EQUAL(test_used(0), 0);
	CHECK_EQUAL(test_used(1), 0);
}

static _Atomic bool stop_injecting;

static void *inject(void *unused)
{
	(void)unused;
	while (!atomic_load(&stop_injecting)) {
		sim_fault_set_hang(test_state(), 0, 1);
		sim_fault_ecc(test_state(), 0, false, 1);
		sim_fault_set_hang(test_state(), 0, 0);
		test_sleep_ms(1);
	}
	return NULL;
}

static void faults_come_while_threads_work(void)
{
	pthread_t injector;
	shared_context = test_context(0);
	shared_spin = test_spin();
	CHECK_EQUAL(pthread_create(&injector, NULL, inject, NULL), 0);
	run_threads(use_pools);
	atomic_store(&stop_injecting, true);
	CHECK_EQUAL(pthread_join(injector, NULL), 0);
	OK(cuCtxSynchronize());
}

/* ---- processes ------------------------------------------------------------------------------------------------------- */

static void fill_and_empty(void *argument)
{
	unsigned seed = (unsigned)getpid();
	_Atomic uint32_t *ready = argument;
	CUdeviceptr pointers[64];
	CUcontext context;
	OK(cuInit(0));
	while (cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS)      /* the others may have filled the card */
		test_sleep_ms(1);
	atomic_fetch_add(ready, 1);
	for (;;) {
		size_t count = 0;
		while (count < COUNT(pointers)) {
			CUresult result = cuMemAlloc_v2(&pointers[count], (64 + (size_t)rand_r(&seed) % 1024) * MIB);
			if (result == CUDA_ERROR_OUT_OF_MEMORY)
				break;
			OK(result);
			count++;
		}
		while (count)
			OK(cuMemFree_v2(pointers[--count]));
	}
}

static void capacity_holds_against_many_processes_and_kills(void)
{
	struct sim_state *state = test_state();
	struct sim_domain domain;
	_Atomic uint32_t *ready = test_shared(4);
	pid_t children[6];
	unsigned seed = 3;
	CHECK(sim_domain_of_gpu(state, 0, &domain));
	for (size_t i = 0; i < COUNT(children); i++)
		children[i] = test_spawn(fill_and_empty, (void *)(uintptr_t)ready);
	test_await(ready, COUNT(children));
	for (int round = 0; round < 40; round++) {
		size_t victim = (size_t)rand_r(&seed) % COUNT(children);
		for (int look = 0; look < 200; look++)
			CHECK(atomic_load(domain.used_bytes) <= domain.capacity_bytes);
		kill(children[victim], SIGKILL);
		test_reap(children[victim], SIGKILL);
		children[victim] = test_spawn(fill_and_empty, (void *)(uintptr_t)ready);
		usleep(rand_r(&seed) % 3000u);
	}
	for (size_t i = 0; i < COUNT(children); i++) {
		kill(children[i], SIGKILL);
		test_reap(children[i], SIGKILL);
	}
	CHECK_EQUAL(test_used(0), 0);
}

static void start_up(void *argument)
{
	CUdeviceptr pointer;
	test_context(0);
	OK(cuMemAlloc_v2(&pointer, 1 * MIB));
	atomic_fetch_add((_Atomic uint32_t *)argument, 1);
	pause();
}

/* A process that dies while it starts, at any point, must not keep the next one waiting. */
static void newcomers_start_while_others_die(void)
{
	_Atomic uint32_t *started = test_shared(4);
	unsigned seed = 5;
	for (int round = 0; round < 40; round++) {
		pid_t doomed[4], newcomer;
		for (size_t i = 0; i < COUNT(doomed); i++)
			doomed[i] = test_spawn(start_up, (void *)(uintptr_t)started);
		usleep(rand_r(&seed) % 4000u);
		for (size_t i = 0; i < COUNT(doomed); i++)
			kill(doomed[i], SIGKILL);
		for (size_t i = 0; i < COUNT(doomed); i++)
			test_reap(doomed[i], SIGKILL);
		atomic_store(started, 0);
		double begin = test_seconds();
		newcomer = test_spawn(start_up, (void *)(uintptr_t)started);
		test_await(started, 1);
		CHECK_BETWEEN(test_seconds() - begin, 0, 1 * test_slack);
		kill(newcomer, SIGKILL);
		test_reap(newcomer, SIGKILL);
	}
	CHECK_EQUAL(test_used(0), 0);
}

/* A killed process leaves the mutex before its record lock: for a moment its slot is free and locked. */
static void hold_first_slots(void *argument)
{
	char path[4096];
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = INT64_C(1) << 40, .l_len = 3 };
	snprintf(path, sizeof path, "%s/state", getenv("ALIQUOT_SIM_DIR"));
	int fd = open(path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK_EQUAL(fcntl(fd, F_SETLK, &lock), 0);
	atomic_fetch_add((_Atomic uint32_t *)argument, 1);
	pause();
}

static void newcomer_passes_over_slots_that_are_still_locked(void)
{
	_Atomic uint32_t *holding = test_shared(4);
	pid_t holder = test_spawn(hold_first_slots, (void *)(uintptr_t)holding);
	test_await(holding, 1);
	_Atomic uint32_t *started = test_shared(4);
	pid_t newcomer = test_spawn(start_up, (void *)(uintptr_t)started);
	test_await(started, 1);
	kill(newcomer, SIGKILL);
	test_reap(newcomer, SIGKILL);
	kill(holder, SIGKILL);
	test_reap(holder, SIGKILL);
	CHECK_EQUAL(test_used(0), 0);
}

static void live_processes_are_listed_with_what_they_hold(void)
{
	_Atomic uint32_t *started = test_shared(4);
	pid_t children[5];
	struct sim_process process;
	int cursor = 0, found = 0;
	for (size_t i = 0; i < COUNT(children); i++)
		children[i] = test_spawn(start_up, (void *)(uintptr_t)started);
	test_await(started, COUNT(children));
	kill(children[2], SIGKILL);
	test_reap(children[2], SIGKILL);
	while (sim_next_process(test_state(), &cursor, &process)) {
		bool known = false;
		for (size_t i = 0; i < COUNT(children); i++)
			known |= i != 2 && process.pid == children[i];
		CHECK(known);
		CHECK(strstr(process.name, "test_cuda_threads"));
		CHECK_EQUAL(sim_slot_used_bytes(test_state(), process.slot, 0), test_state()->topology.gpus[0].context_bytes + 2 * MIB);
		found++;
	}
	CHECK_EQUAL(found, COUNT(children) - 1);
	CHECK_EQUAL(sim_gpu_contexts(test_state(), 0, SIM_WHOLE_GPU), COUNT(children) - 1);
	for (size_t i = 0; i < COUNT(children); i++)
		if (i != 2) {
			kill(children[i], SIGKILL);
			test_reap(children[i], SIGKILL);
		}
}

struct latency {
	_Atomic uint32_t ready, stop;
	double worst_seconds;
};

static void measure_allocations(void *argument)
{
	struct latency *latency = argument;
	CUdeviceptr pointer;
	test_context(0);
	atomic_store(&latency->ready, 1);
	while (!atomic_load(&latency->stop)) {
		double begin = test_seconds();
		if (cuMemAlloc_v2(&pointer, 1 * GIB) == CUDA_SUCCESS)
			OK(cuMemFree_v2(pointer));
		double seconds = test_seconds() - begin;
		if (seconds > latency->worst_seconds)
			latency->worst_seconds = seconds;
	}
}

/* A stopped process that is half-way through a change holds up the others for no longer than a repair's patience. */
static void stopped_process_blocks_no_other(void)
{
	struct latency *latency = test_shared(sizeof *latency);
	_Atomic uint32_t *ready = test_shared(4);
	unsigned seed = 9;
	pid_t survivor = test_spawn(measure_allocations, latency);
	test_await(&latency->ready, 1);
	pid_t stopped = test_spawn(fill_and_empty, (void *)(uintptr_t)ready);
	test_await(ready, 1);
	for (int round = 0; round < 20; round++) {
		pid_t victim = test_spawn(fill_and_empty, (void *)(uintptr_t)ready);
		usleep(rand_r(&seed) % 5000u);
		kill(stopped, SIGSTOP);
		kill(victim, SIGKILL);
		test_reap(victim, SIGKILL);
		usleep(rand_r(&seed) % 5000u);
		kill(stopped, SIGCONT);
	}
	atomic_store(&latency->stop, 1);
	test_reap(survivor, 0);
	CHECK_BETWEEN(latency->worst_seconds, 0, 1 * test_slack);
	kill(stopped, SIGKILL);
	test_reap(stopped, SIGKILL);
	CHECK_EQUAL(test_used(0), 0);
}

static const struct test_case cases[] = {
	CASE(threads_get_separate_memory_and_lose_none, "t4x2"),
	CASE(threads_launch_on_their_own_and_shared_streams, "t4x2"),
	CASE(threads_share_a_pool, "t4x2"),
	CASE(threads_map_and_unmap, "t4x2"),
	CASE(threads_make_and_end_contexts, "t4x2"),
	CASE(faults_come_while_threads_work, "t4x2"),
	CASE(capacity_holds_against_many_processes_and_kills, "t4x2"),
	CASE(newcomers_start_while_others_die, "t4x2"),
	CASE(newcomer_passes_over_slots_that_are_still_locked, "t4x2"),
	CASE(live_processes_are_listed_with_what_they_hold, "t4x2"),
	CASE(stopped_process_blocks_no_other, "t4x2"),
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, COUNT(cases));
}
