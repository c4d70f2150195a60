/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations, copies, fills, pools, pointers and memory of other processes. */
#include "simulated_runtime/tests/client.h"

#include <stdlib.h>
#include <unistd.h>

#define BYTES 4096

static void test_allocations_count_and_end(void)
{
	size_t before, after, total;
	void *pointer;
	OK(cudaFree(NULL));
	OK(cudaMemGetInfo(&before, &total));
	OK(cudaMalloc(&pointer, 64 * MIB));
	OK(cudaMemGetInfo(&after, &total));
	CHECK_EQUAL(before - after, 64 * MIB);
	OK(cudaFree(pointer));
	OK(cudaMemGetInfo(&after, &total));
	CHECK_EQUAL(before, after);
	FAILS(cudaMalloc(&pointer, total + 1), cudaErrorMemoryAllocation);
	FAILS(cudaMalloc(NULL, 1), cudaErrorInvalidValue);
	FAILS(cudaFree((void *)(uintptr_t)12345), cudaErrorInvalidValue);
}

static void test_zero_bytes_and_null_succeed(void)
{
	void *pointer = numbers;
	OK(cudaMalloc(&pointer, 0));
	CHECK(!pointer);
	pointer = numbers;
	OK(cudaHostAlloc(&pointer, 0, 0));
	CHECK(!pointer);
	pointer = numbers;
	OK(cudaMallocAsync(&pointer, 0, NULL));
	CHECK(!pointer);
	OK(cudaFree(NULL));
	OK(cudaFreeHost(NULL));
	for (int kind = cudaMemcpyHostToHost; kind <= cudaMemcpyDefault; kind++) {
		OK(cudaMemcpy(NULL, NULL, 0, kind));
		OK(cudaMemcpyAsync(NULL, NULL, 0, kind, NULL));
		OK(cudaMemcpy2DAsync(NULL, 0, NULL, 0, 0, 0, kind, NULL));
	}
	OK(cudaMemset(NULL, 0, 0));
	OK(cudaMemsetAsync(NULL, 0, 0, NULL));
	OK(cudaMemcpyPeerAsync(NULL, 0, NULL, 0, 0, NULL));
}

/* Each pair of ends, in each direction that says what they are, by each form of copy. */
static void copy_each_way(cudaError_t (*copy)(void *, const void *, size_t, int))
{
	char from[BYTES], to[BYTES];
	void *first, *second;
	memset(from, 'a', sizeof(from));
	OK(cudaMalloc(&first, BYTES));
	OK(cudaMalloc(&second, BYTES));
	for (int by_kind = 0; by_kind < 2; by_kind++) {
		memset(to, 0, sizeof(to));
		OK(copy(first, from, BYTES, by_kind ? cudaMemcpyHostToDevice : cudaMemcpyDefault));
		OK(copy(second, first, BYTES, by_kind ? cudaMemcpyDeviceToDevice : cudaMemcpyDefault));
		OK(copy(to, second, BYTES, by_kind ? cudaMemcpyDeviceToHost : cudaMemcpyDefault));
		CHECK_EQUAL(memcmp(from, to, BYTES), 0);
		memset(to, 0, sizeof(to));
		OK(copy(to, from, BYTES, by_kind ? cudaMemcpyHostToHost : cudaMemcpyDefault));
		CHECK_EQUAL(memcmp(from, to, BYTES), 0);
	}
	FAILS(copy(first, from, BYTES, 5), cudaErrorInvalidMemcpyDirection);
	FAILS(copy(first, from, BYTES, -1), cudaErrorInvalidMemcpyDirection);
}

static cudaError_t asynchronously(void *to, const void *from, size_t bytes, int kind)
{
	cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, NULL);
	OK(cudaDeviceSynchronize());
	return error;
}

static cudaError_t on_the_thread(void *to, const void *from, size_t bytes, int kind)
{
	cudaError_t error = cudaMemcpyAsync_ptsz(to, from, bytes, kind, NULL);
	OK(cudaStreamSynchronize(CU_STREAM_PER_THREAD));
	return error;
}

static cudaError_t in_rows(void *to, const void *from, size_t bytes, int kind)
{
	cudaError_t error = cudaMemcpy2DAsync(to, 64, from, 64, 64, bytes / 64, kind, NULL);
	OK(cudaDeviceSynchronize());
	return error;
}

static void test_copies_in_each_direction_and_form(void)
{
	char row[128];
	void *device;
	copy_each_way(cudaMemcpy);
	copy_each_way(cudaMemcpy_ptds);
	copy_each_way(asynchronously);
	copy_each_way(on_the_thread);
	copy_each_way(in_rows);
	OK(cudaMalloc(&device, BYTES));
	FAILS(cudaMemcpy2DAsync(device, 32, row, 64, 64, 2, cudaMemcpyHostToDevice, NULL), cudaErrorInvalidPitchValue);
}

static void test_rows_keep_their_pitch(void)
{
	char from[4 * 32], to[4 * 16] = { 0 };
	void *device;
	for (size_t i = 0; i < sizeof(from); i++)
		from[i] = (char)i;
	OK(cudaMalloc(&device, BYTES));
	OK(cudaMemcpy2DAsync(device, 64, from, 32, 16, 4, cudaMemcpyHostToDevice, NULL));
	OK(cudaMemcpy2DAsync(to, 16, device, 64, 16, 4, cudaMemcpyDeviceToHost, NULL));
	OK(cudaDeviceSynchronize());
	for (int row = 0; row < 4; row++)
		CHECK_EQUAL(memcmp(&to[row * 16], &from[row * 32], 16), 0);
}

static void test_fills(void)
{
	char back[BYTES];
	void *device;
	OK(cudaMalloc(&device, BYTES));
	OK(cudaMemset(device, 0x41, BYTES));
	OK(cudaMemset_ptds(device, 0x42, 2));
	OK(cudaMemsetAsync(device, 0x143, 1, NULL));
	OK(cudaMemcpy(back, device, BYTES, cudaMemcpyDeviceToHost));
	CHECK(back[0] == 0x43 && back[1] == 0x42 && back[2] == 0x41 && back[BYTES - 1] == 0x41);
	FAILS(cudaMemset(NULL, 0, 1), cudaErrorInvalidValue);
}

/* ---- what a pointer is ----------------------------------------------------------------------------------------------- */

static void check_pointer(void *pointer, enum cudaMemoryType type, int device)
{
	struct cudaPointerAttributes attributes;
	OK(cudaPointerGetAttributes(&attributes, pointer));
	CHECK_EQUAL(attributes.type, type);
	CHECK_EQUAL(attributes.device, device);
	if (type == cudaMemoryTypeDevice)
		CHECK(attributes.devicePointer == pointer && !attributes.hostPointer);
	else
		CHECK(attributes.hostPointer == pointer);
}

static void test_attributes_of_pointers(void)
{
	static char registered[BYTES] __attribute__((aligned(BYTES)));
	void *device, *host, *pinned, *managed;
	char stack;
	OK(cudaMalloc(&device, BYTES));
	OK(cudaHostAlloc(&host, BYTES, CU_MEMHOSTALLOC_PORTABLE));
	OK(cudaMallocHost(&pinned, BYTES));
	OK(cudaMallocManaged(&managed, BYTES, CU_MEM_ATTACH_GLOBAL));
	OK(cudaHostRegister(registered, BYTES, 0));
	check_pointer(device, cudaMemoryTypeDevice, 0);
	check_pointer(host, cudaMemoryTypeHost, 0);
	check_pointer(pinned, cudaMemoryTypeHost, 0);
	check_pointer(registered, cudaMemoryTypeHost, 0);
	check_pointer(managed, cudaMemoryTypeManaged, 0);
	check_pointer(&stack, cudaMemoryTypeUnregistered, CU_DEVICE_INVALID);
	FAILS(cudaPointerGetAttributes(NULL, device), cudaErrorInvalidValue);
	memset(managed, 7, BYTES);
	OK(cudaFree(managed));
	OK(cudaFreeHost(host));
	OK(cudaFreeHost(pinned));
	OK(cudaHostUnregister(registered));
	check_pointer(registered, cudaMemoryTypeUnregistered, CU_DEVICE_INVALID);
	FAILS(cudaHostUnregister(registered), cudaErrorHostMemoryNotRegistered);
	FAILS(cudaMallocManaged(&managed, 0, CU_MEM_ATTACH_GLOBAL), cudaErrorInvalidValue);
	FAILS(cudaMallocHost(NULL, 1), cudaErrorInvalidValue);
}

/* ---- pools ----------------------------------------------------------------------------------------------------------- */

static void test_pools(void)
{
	CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	uint64_t threshold = UINT64_MAX, used = 0;
	cudaMemPool_t pool;
	void *pointer;
	OK(cudaDeviceGetDefaultMemPool(&pool, 0));
	OK(cudaMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
	OK(cudaMemPoolSetAccess(pool, &access, 1));
	OK(cudaMallocAsync(&pointer, MIB, NULL));
	OK(cudaMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
	CHECK_EQUAL(used, MIB);
	OK(cudaFreeAsync(pointer, NULL));
	OK(cudaMallocAsync_ptsz(&pointer, MIB, NULL));
	OK(cudaFreeAsync_ptsz(pointer, NULL));
	OK(cudaDeviceSynchronize());
	OK(cudaMemPoolTrimTo(pool, 0));
	OK(cudaMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &used));
	CHECK_EQUAL(used, 0);
	FAILS(cudaDeviceGetDefaultMemPool(&pool, 99), cudaErrorInvalidDevice);
	FAILS(cudaMallocAsync(NULL, 1, NULL), cudaErrorInvalidValue);
}

/* ---- other processes ------------------------------------------------------------------------------------------------- */

struct shared {
	CUipcMemHandle memory;
	CUipcEventHandle event;
	_Atomic uint32_t step;
};

static void export_memory(void *argument)
{
	struct shared *shared = argument;
	void *memory;
	cudaEvent_t event;
	OK(cudaMalloc(&memory, BYTES));
	OK(cudaMemset(memory, 'p', BYTES));
	OK(cudaIpcGetMemHandle(&shared->memory, memory));
	OK(cudaEventCreateWithFlags(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
	OK(cudaEventRecord(event, NULL));
	OK(cudaIpcGetEventHandle(&shared->event, event));
	shared->step = 1;
	test_await(&shared->step, 2);
}

static void import_memory(void *argument)
{
	struct shared *shared = argument;
	char back[BYTES];
	void *memory;
	cudaEvent_t event;
	test_await(&shared->step, 1);
	OK(cudaIpcOpenEventHandle(&event, shared->event));
	OK(cudaStreamWaitEvent(NULL, event, 0));
	OK(cudaIpcOpenMemHandle(&memory, shared->memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cudaMemcpy(back, memory, BYTES, cudaMemcpyDeviceToHost));
	CHECK(back[0] == 'p' && back[BYTES - 1] == 'p');
	OK(cudaIpcCloseMemHandle(memory));
	OK(cudaEventDestroy(event));
	shared->step = 2;
}

static void test_memory_and_events_between_processes(void)
{
	struct shared *shared = test_shared(sizeof(*shared));
	pid_t exporter = test_spawn(export_memory, shared);
	pid_t importer = test_spawn(import_memory, shared);
	test_reap(importer, 0);
	test_reap(exporter, 0);
}

static const struct test_case cases[] = {
	CASE(test_allocations_count_and_end, "h200x8"),
	CASE(test_zero_bytes_and_null_succeed, "h200x8"),
	CASE(test_copies_in_each_direction_and_form, "h200x8"),
	CASE(test_rows_keep_their_pitch, "h200x8"),
	CASE(test_fills, "h200x8"),
	CASE(test_attributes_of_pointers, "h200x8"),
	CASE(test_pools, "h200x8"),
	CASE(test_memory_and_events_between_processes, "h200x8"),
};

int main(int argc, char **argv)
{
	return client_main(argc, argv, cases, sizeof(cases) / sizeof(*cases));
}
