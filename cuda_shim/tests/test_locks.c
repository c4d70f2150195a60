/* SPDX-License-Identifier: Apache-2.0 */
/* No thread waits without end. The driver reports every call to a tool, and the tool calls the front in turn, each time something else, on
 * many threads that take and give back contexts, modules, pools and mappings at a limit that is always near. Code that holds a lock across
 * a call to the driver and does not keep the order of latch.h hangs here. Under ThreadSanitizer this also shows circles of waiting that did
 * not close.
 *
 * Argument: the build directory. Needs its simulated driver. */
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "tests/unpacked.h"

#define LIMIT_BYTES (2048 * MIB)
#define THREADS 6
#define ROUNDS 400
#define PATIENCE_SECONDS 120
#define DEVICES 3 /* the first of them is granted */
#define ONE_IN 24 /* of the driver's calls does the tool do something */
#define CALLS_OF_ONE 64 /* more than any trade makes by itself */

#define CALLS(X)                                                                                                           \
	X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease_v2) X(cuCtxSetCurrent) X(cuCtxCreate_v2)        \
	X(cuCtxDestroy_v2) X(cuCtxSetLimit) X(cuModuleLoadData) X(cuModuleUnload) X(cuMemGetInfo_v2) X(cuMemAlloc_v2)     \
	X(cuMemFree_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemPoolCreate) X(cuMemPoolDestroy) X(cuMemPoolTrimTo)    \
	X(cuMemAllocFromPoolAsync) X(cuDeviceGetDefaultMemPool) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap)  \
	X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemRetainAllocationHandle) X(cuStreamSynchronize) X(cuGetProcAddress_v2)

UNPACKED_CALLS(CALLS);

static CUcontext context;
static __thread uint32_t random_state;

static uint32_t any(uint32_t count)
{
	return support_random(&random_state) % count;
}

/* ---- what threads and tools do; refusals are part of the game ---------------------------------------------------- */

static void retaining(void)
{
	CUdevice ordinal = (CUdevice)any(DEVICES);
	CUcontext retained;

	if (cu.cuDevicePrimaryCtxRetain(&retained, ordinal) == CUDA_SUCCESS)
		CHECK(cu.cuDevicePrimaryCtxRelease_v2(ordinal) == CUDA_SUCCESS);
}

static void contexts(void)
{
	CUdeviceptr address;
	CUcontext made;

	if (cu.cuCtxCreate_v2(&made, 0, 0) != CUDA_SUCCESS)
		return;
	cu.cuMemAlloc_v2(&address, MIB);
	if (cu.cuMemAllocAsync(&address, MIB, NULL) == CUDA_SUCCESS)
		CHECK(cu.cuMemFreeAsync(address, NULL) == CUDA_SUCCESS);
	CHECK(cu.cuCtxDestroy_v2(made) == CUDA_SUCCESS);
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
}

static void limits(void)
{
	cu.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, (any(64) + 1) * MIB);
}

static void modules(void)
{
	static const char image[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry aliquot_nothing() { ret; }\n";
	CUmodule module;

	if (cu.cuModuleLoadData(&module, image) == CUDA_SUCCESS)
		CHECK(cu.cuModuleUnload(module) == CUDA_SUCCESS);
}

static void linear(void)
{
	CUdeviceptr address;

	if (cu.cuMemAlloc_v2(&address, (any(256) + 1) * MIB) == CUDA_SUCCESS)
		CHECK((any(2) ? cu.cuMemFree_v2(address) : cu.cuMemFreeAsync(address, NULL)) == CUDA_SUCCESS);
}

static void pooled(void)
{
	CUmemoryPool pool;
	CUdeviceptr address;

	if (cu.cuMemAllocAsync(&address, (any(256) + 1) * MIB, NULL) == CUDA_SUCCESS)
		CHECK(cu.cuMemFreeAsync(address, NULL) == CUDA_SUCCESS);
	if (any(2))
		cu.cuStreamSynchronize(NULL);
	else if (cu.cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS)
		cu.cuMemPoolTrimTo(pool, 0);
}

static void pools(void)
{
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemoryPool pool;
	CUdeviceptr address;

	if (cu.cuMemPoolCreate(&pool, &props) != CUDA_SUCCESS)
		return;
	if (cu.cuMemAllocFromPoolAsync(&address, MIB, pool, NULL) == CUDA_SUCCESS)
		CHECK(cu.cuMemFree_v2(address) == CUDA_SUCCESS);
	CHECK(cu.cuMemPoolDestroy(pool) == CUDA_SUCCESS);
}

static void physical(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemGenericAllocationHandle handle, retained;
	CUdeviceptr address;

	if (cu.cuMemCreate(&handle, 2 * MIB, &prop, 0) != CUDA_SUCCESS)
		return;
	CHECK(cu.cuMemAddressReserve(&address, 2 * MIB, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cu.cuMemMap(address, 2 * MIB, 0, handle, 0) == CUDA_SUCCESS);
	CHECK(cu.cuMemRelease(handle) == CUDA_SUCCESS);
	CHECK(cu.cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)address) == CUDA_SUCCESS);
	CHECK(cu.cuMemUnmap(address, 2 * MIB) == CUDA_SUCCESS);
	CHECK(cu.cuMemRelease(retained) == CUDA_SUCCESS);
	CHECK(cu.cuMemAddressFree(address, 2 * MIB) == CUDA_SUCCESS);
}

static void asking(void)
{
	size_t free_bytes, total_bytes;

	cu.cuMemGetInfo_v2(&free_bytes, &total_bytes);
}

static void looking_up(void)
{
	CUdriverProcAddressQueryResult status;
	void *address;

	CHECK(cu.cuGetProcAddress_v2("cuMemAlloc", &address, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status) == CUDA_SUCCESS);
}

static void (*const trades[])(void) = { retaining, contexts, limits, modules, linear, pooled, pools, physical, asking, looking_up };
#define TRADES (sizeof(trades) / sizeof(trades[0]))

/* ---- the threads, and the tool in each --------------------------------------------------------------------------- */

static void tool(void)
{
	if (!any(ONE_IN))
		trades[any(TRADES)]();
}

static void *ply(void *argument)
{
	random_state = 4711 + (uint32_t)(uintptr_t)argument;
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	for (unsigned i = 0; i < ROUNDS; i++)
		trades[any(TRADES)]();
	return NULL;
}

/* Not from the first lookup itself, but from those by which the front then learns all that the driver answers. */
static void look_up_late(void)
{
	static unsigned told;

	if (++told > 2) /* the beginning of the first one, and its end */
		looking_up();
}

static unsigned from_each, calls_left;

/* From every call, but with an end: the driver's next callback may query a pool that is made here, and its calls make more. */
static void do_from_each(void)
{
	if (calls_left && calls_left--)
		trades[from_each]();
}

/* One thread, and a tool that does one thing from every call of another. */
static void each_from_each(void (*subscribe)(void (*)(void)))
{
	subscribe(do_from_each);
	for (from_each = 0; from_each < TRADES; from_each++)
		for (unsigned i = 0; i < TRADES; i++) {
			calls_left = CALLS_OF_ONE;
			trades[i]();
		}
	subscribe(tool);
}

/* As the loader does for a program that links to both: what the front does not change is the driver's. */
static void find_driver(const char *simulated)
{
	void *front = unpacked_front(), *driver = dlopen(simulated, RTLD_NOW | RTLD_LOCAL);
	void *address;

#define FIND(name)                                                                                \
	address = dlsym(front, #name);                                                            \
	CHECK(cu.name = (__typeof__(cu.name))(address ? address : dlsym(driver, #name)));
	CALLS(FIND)
#undef FIND
}

int main(int argc, char **argv)
{
	static struct support_page page;
	pthread_t threads[THREADS];
	char simulated[PATH_MAX], calling[PATH_MAX];
	size_t free_bytes, total_bytes;

	CHECK(argc == 2);
	alarm(PATIENCE_SECONDS);
	snprintf(simulated, sizeof(simulated), "%s/lib/sim/libcuda.so.1", argv[1]);
	snprintf(calling, sizeof(calling), "%s/tests/libcalling.so", argv[1]);
	CHECK(setenv("CALLING_DRIVER", simulated, 1) == 0);
	unpacked_container(argv[1], LIMIT_BYTES, &page);
	unpacked_replace_driver(calling);
	find_driver(simulated);
	void (*subscribe)(void (*)(void)) = (void (*)(void (*)(void)))dlsym(unpacked_driver(), "calling_driver_subscribe");
	CHECK(subscribe);
	subscribe(look_up_late);
	looking_up();
	subscribe(asking);
	CHECK(cu.cuInit(0) == CUDA_SUCCESS);
	CHECK(cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	random_state = 1;
	each_from_each(subscribe);
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, ply, (void *)i) == 0);
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(cu.cuMemGetInfo_v2(&free_bytes, &total_bytes) == CUDA_SUCCESS && total_bytes == LIMIT_BYTES);
	unpacked_remove();
	return 0;
}
