/* SPDX-License-Identifier: Apache-2.0 */
/* The front under many threads at once, each allocating and freeing in another way, while limits change and others query free memory. At
 * the end everything is uncharged. Under a sanitizer this also shows races and misuse of memory inside the shim.
 *
 * Argument: the build directory. Needs its simulated driver. */
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "tests/unpacked.h"

#define LIMIT_BYTES (4096 * MIB)
#define ROUNDS 150
#define POOLS 400

#define CALLS(X)                                                                                                          \
	X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxCreate_v2) X(cuCtxDestroy_v2) X(cuMemAlloc_v2)   \
	X(cuMemFree_v2) X(cuMemAllocPitch_v2) X(cuMemAllocManaged) X(cuMemGetInfo_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) \
	X(cuStreamSynchronize) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemAddressReserve)           \
	X(cuMemAddressFree) X(cuMemRetainAllocationHandle) X(cuArray3DCreate_v2) X(cuArrayDestroy) X(cuCtxSynchronize) \
	X(cuMemPoolCreate) X(cuMemPoolDestroy) X(cuMemAllocFromPoolAsync)

UNPACKED_CALLS(CALLS);

static CUcontext context;
static size_t free_at_start;
static struct support_page page;

/* Refusals are part of the game; anything else is not. */
static bool got(CUresult result)
{
	if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) {
		fprintf(stderr, "unexpected result %d\n", result);
		exit(1);
	}
	return result == CUDA_SUCCESS;
}

static void linear(uint32_t *random)
{
	CUdeviceptr address;

	if (got(cu.cuMemAlloc_v2(&address, support_random(random) % (256 * MIB) + 1)))
		CHECK(cu.cuMemFree_v2(address) == CUDA_SUCCESS);
}

static void freed_in_stream_order(uint32_t *random)
{
	CUdeviceptr address;

	if (got(cu.cuMemAlloc_v2(&address, support_random(random) % MIB + 1)))
		CHECK(cu.cuMemFreeAsync(address, NULL) == CUDA_SUCCESS);
}

static void pitched(uint32_t *random)
{
	CUdeviceptr address;
	size_t pitch;

	if (got(cu.cuMemAllocPitch_v2(&address, &pitch, 4, support_random(random) % 100000 + 1, 4)))
		CHECK(cu.cuMemFree_v2(address) == CUDA_SUCCESS);
}

static void managed(uint32_t *random)
{
	CUdeviceptr address;

	if (got(cu.cuMemAllocManaged(&address, support_random(random) % (8 * MIB) + 1, CU_MEM_ATTACH_GLOBAL)))
		CHECK(cu.cuMemFree_v2(address) == CUDA_SUCCESS);
}

static void pooled(uint32_t *random)
{
	CUdeviceptr address;

	if (got(cu.cuMemAllocAsync(&address, support_random(random) % (128 * MIB) + 1, NULL))) {
		CHECK(cu.cuMemFreeAsync(address, NULL) == CUDA_SUCCESS);
		CHECK(cu.cuStreamSynchronize(NULL) == CUDA_SUCCESS);
	}
}

static void physical(uint32_t *random)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	size_t bytes = (support_random(random) % 32 + 1) * 2 * MIB;
	CUmemGenericAllocationHandle handle, retained;
	CUdeviceptr address;

	if (!got(cu.cuMemCreate(&handle, bytes, &prop, 0)))
		return;
	CHECK(cu.cuMemAddressReserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cu.cuMemMap(address, bytes, 0, handle, 0) == CUDA_SUCCESS);
	CHECK(cu.cuMemRelease(handle) == CUDA_SUCCESS);
	CHECK(cu.cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)address) == CUDA_SUCCESS);
	CHECK(cu.cuMemUnmap(address, bytes) == CUDA_SUCCESS);
	CHECK(cu.cuMemRelease(retained) == CUDA_SUCCESS);
	CHECK(cu.cuMemAddressFree(address, bytes) == CUDA_SUCCESS);
}

static void textures(uint32_t *random)
{
	CUDA_ARRAY3D_DESCRIPTOR shape = {
		.Width = 1024, .Height = support_random(random) % 1024 + 1, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4
	};
	CUarray array;

	if (got(cu.cuArray3DCreate_v2(&array, &shape)))
		CHECK(cu.cuArrayDestroy(array) == CUDA_SUCCESS);
}

static void contexts(uint32_t *random)
{
	CUdeviceptr address;
	CUcontext made;

	if (got(cu.cuCtxCreate_v2(&made, 0, 0))) {
		got(cu.cuMemAlloc_v2(&address, support_random(random) % MIB + 1));
		CHECK(cu.cuCtxDestroy_v2(made) == CUDA_SUCCESS); /* and what was allocated in it */
		CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	}
}

static void asking(uint32_t *random)
{
	size_t free_bytes, total_bytes;

	(void)random;
	CHECK(cu.cuMemGetInfo_v2(&free_bytes, &total_bytes) == CUDA_SUCCESS);
	CHECK(total_bytes == LIMIT_BYTES || total_bytes == LIMIT_BYTES / 2);
	CHECK(free_bytes <= total_bytes);
}

/* As the agent does: odd, content, even. */
static void changing_limits(uint32_t *random)
{
	static struct support_page next;
	static uint64_t generation = 2;

	next = page;
	next.header.generation = generation + 1;
	unpacked_write_limits(&next);
	next.device[0].memory_bytes = support_random(random) % 2 ? LIMIT_BYTES : LIMIT_BYTES / 2;
	next.header.checksum = support_checksum(&next);
	unpacked_write_limits(&next);
	next.header.generation = generation += 2;
	unpacked_write_limits(&next);
	usleep(1000);
}

static void (*const trades[])(uint32_t *random) = {
	linear, linear, freed_in_stream_order, pitched, managed, pooled, pooled, physical, physical, textures, contexts,
	asking, asking, changing_limits
};
#define TRADES (sizeof(trades) / sizeof(trades[0]))

static void *ply(void *argument)
{
	unsigned trade = (unsigned)(uintptr_t)argument;
	uint32_t random = 77 + trade;

	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	for (unsigned i = 0; i < ROUNDS; i++)
		trades[trade](&random);
	return NULL;
}

/* A pool that gets the handle of one just destroyed is a new one, and what it takes is charged: while it holds memory, that is not free. */
static void *pools_in_turn(void *unused)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	size_t free_bytes, total_bytes;
	CUmemoryPool pool;
	CUdeviceptr address;

	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	for (unsigned i = 0; i < POOLS; i++) {
		CHECK(cu.cuMemPoolCreate(&pool, &props) == CUDA_SUCCESS);
		CHECK(cu.cuMemAllocFromPoolAsync(&address, MIB, pool, NULL) == CUDA_SUCCESS);
		CHECK(cu.cuMemGetInfo_v2(&free_bytes, &total_bytes) == CUDA_SUCCESS);
		CHECK(free_bytes <= free_at_start - MIB);
		CHECK(cu.cuMemFree_v2(address) == CUDA_SUCCESS);
		CHECK(cu.cuMemPoolDestroy(pool) == CUDA_SUCCESS);
	}
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t threads[TRADES];
	size_t before, after, total;

	CHECK(argc == 2);
	unpacked_container(argv[1], LIMIT_BYTES, &page);
	UNPACKED_FIND(CALLS);
	CHECK(cu.cuInit(0) == CUDA_SUCCESS);
	CHECK(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cu.cuMemGetInfo_v2(&before, &total) == CUDA_SUCCESS);
	free_at_start = before;
	for (unsigned i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, pools_in_turn, NULL) == 0);
	for (unsigned i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	for (uintptr_t i = 0; i < TRADES; i++)
		CHECK(pthread_create(&threads[i], NULL, ply, (void *)i) == 0);
	for (unsigned i = 0; i < TRADES; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(cu.cuCtxSynchronize() == CUDA_SUCCESS);
	uint32_t full = 2; /* the limit may have ended lowered: set it until it is as it was */
	do {
		changing_limits(&full);
		CHECK(cu.cuMemGetInfo_v2(&after, &total) == CUDA_SUCCESS);
	} while (total != LIMIT_BYTES);
	if (after != before) {
		fprintf(stderr, "%zu bytes free before, %zu after\n", before, after);
		exit(1);
	}
	unpacked_remove();
	return 0;
}
