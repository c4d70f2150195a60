/* SPDX-License-Identifier: Apache-2.0 */
/* Any sequence of allocating and freeing calls, through the built front on the simulated driver, compared with a model of the bytes held.
 *
 * Invariant after every call: what is granted fits the limit and what is refused does not; a refusal is out-of-memory and leaves its output
 * alone; the free bytes are exactly the limit less the model (pools apart, which take memory in pieces: then at least the model is taken);
 * and what the driver itself lost never passes the limit by more than its pages. When all is freed everything is back.
 *
 * Linear, pitched and managed memory, arrays and mipmaps, the default pool and one of the program's own, cuMemCreate. Not here: contexts
 * and modules, which the shim charges by what it measures, so a model would have to guess (tests/integration/test_shim_modules.py,
 * test_shim_memory.py).
 *
 * Argument: the build directory, or ALIQUOT_BUILD. */
#include <dlfcn.h>
#include <stdbool.h>
#include <sys/stat.h>

#include "cuda_abi.h"
#include "fuzz/fuzz.h"
#include "tests/unpacked.h"

#define LIMIT_BYTES (2048 * MIB)
#define HELD_MAX 48u
#define UNIT 512u
#define SMALL MIB
#define PAGE (2 * MIB)
#define UNTOUCHED 0xdeadbeefu

#define CALLS(X)                                                                                                        \
	X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemAllocManaged) \
	X(cuMemGetInfo_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuStreamSynchronize) X(cuMemCreate) X(cuMemRelease)  \
	X(cuMemMap) X(cuMemUnmap) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuDeviceGetDefaultMemPool) X(cuMemPoolTrimTo)       \
	X(cuMemAllocPitch_v2) X(cuArray3DCreate_v2) X(cuArrayDestroy) X(cuMipmappedArrayCreate) X(cuMipmappedArrayDestroy)       \
	X(cuMemPoolCreate) X(cuMemAllocFromPoolAsync)

UNPACKED_CALLS(CALLS);

enum kind { NONE, LINEAR, MANAGED, ARRAY, MIPMAP, POOLED, PHYSICAL, MAPPED };

static struct held {
	enum kind kind;
	uint64_t bytes;
	CUdeviceptr address;
	CUmemGenericAllocationHandle handle;
	CUarray array;
	CUmipmappedArray mipmap;
} held[HELD_MAX];

static uint64_t model_bytes, pooled_bytes;
static size_t free_at_start, physical_at_start;
static __typeof__(&cuMemGetInfo_v2) physical_info;
static CUmemoryPool pool, own_pool;

static void find_drivers(void)
{
	UNPACKED_FIND(CALLS);
	physical_info = (__typeof__(physical_info))dlsym(unpacked_driver(), "cuMemGetInfo_v2");
	CHECK(physical_info);
}

static size_t free_now(void)
{
	size_t free_bytes, total_bytes;

	CHECK(cu.cuMemGetInfo_v2(&free_bytes, &total_bytes) == CUDA_SUCCESS);
	CHECK(total_bytes == LIMIT_BYTES && free_bytes <= total_bytes);
	return free_bytes;
}

static size_t physical_free_now(void)
{
	size_t free_bytes, total_bytes;

	CHECK(physical_info(&free_bytes, &total_bytes) == CUDA_SUCCESS);
	return free_bytes;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	static struct support_page page;
	struct stat about;
	CUcontext context;
	const char *build = getenv("ALIQUOT_BUILD");
	if (!build && *argc > 1 && stat((*argv)[1], &about) == 0 && S_ISDIR(about.st_mode))
		build = (*argv)[1];
	if (!build) {
		fprintf(stderr, "expected the build directory as argument or in ALIQUOT_BUILD\n");
		exit(2);
	}
	unpacked_container(build, LIMIT_BYTES, &page);
	atexit(unpacked_remove);
	find_drivers();
	CHECK(cu.cuInit(0) == CUDA_SUCCESS && cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
	CHECK(cu.cuCtxSetCurrent(context) == CUDA_SUCCESS && cu.cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS);
	CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CHECK(cu.cuMemPoolCreate(&own_pool, &props) == CUDA_SUCCESS);
	free_at_start = free_now();
	physical_at_start = physical_free_now();
	return 0;
}

/* ---- calls, and what they mean for the model ---------------------------------------------------------------------- */

static uint64_t rounded(uint64_t bytes, uint64_t unit)
{
	return (bytes + unit - 1) / unit * unit;
}

/* What the device loses: large memory comes in pages, small memory shares them. */
static uint64_t lost(uint64_t bytes)
{
	return rounded(bytes, bytes > SMALL ? PAGE : UNIT);
}

/* Was the grant, or the refusal, right? */
static bool granted(CUresult result, uint64_t bytes)
{
	bool fits = model_bytes + pooled_bytes + bytes <= free_at_start;

	CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(result != CUDA_SUCCESS || fits);
	CHECK(result == CUDA_SUCCESS || !fits || pooled_bytes);
	return result == CUDA_SUCCESS;
}

/* The charge for `bytes` now, if they are granted: the footprint on the device if that much is free, otherwise the request. */
static uint64_t price(uint64_t bytes)
{
	return lost(bytes) <= free_now() ? lost(bytes) : rounded(bytes, UNIT);
}

static void take_linear(struct held *slot, uint64_t bytes, bool managed)
{
	CUdeviceptr address = UNTOUCHED;
	uint64_t charge = price(bytes);
	CUresult result = managed ? cu.cuMemAllocManaged(&address, bytes, CU_MEM_ATTACH_GLOBAL) : cu.cuMemAlloc_v2(&address, bytes);

	if (bytes == 0) {
		CHECK(result == CUDA_ERROR_INVALID_VALUE);
	} else if (granted(result, charge)) {
		*slot = (struct held){ .kind = managed ? MANAGED : LINEAR, .bytes = charge, .address = address };
		model_bytes += slot->bytes;
		return;
	}
	CHECK(address == UNTOUCHED);
}

/* Rows are aligned, of pitched memory and of arrays alike. */
static void take_pitched(struct held *slot, uint64_t width, uint64_t height)
{
	CUdeviceptr address = UNTOUCHED;
	size_t pitch = UNTOUCHED;
	uint64_t charge = price(rounded(width, UNIT) * height);
	CUresult result = cu.cuMemAllocPitch_v2(&address, &pitch, width, height, 4);

	if (charge == 0) {
		CHECK(result == CUDA_ERROR_INVALID_VALUE);
	} else if (granted(result, charge)) {
		CHECK(pitch == rounded(width, UNIT));
		*slot = (struct held){ .kind = LINEAR, .bytes = charge, .address = address };
		model_bytes += charge;
		return;
	}
	CHECK(address == UNTOUCHED && pitch == UNTOUCHED);
}

static uint64_t at_least_one(uint64_t n)
{
	return n ? n : 1;
}

static CUDA_ARRAY3D_DESCRIPTOR array_shape(uint64_t random)
{
	CUDA_ARRAY3D_DESCRIPTOR shape = { .Width = (random & 0x3fff) + 8,
					  .Height = random >> 14 & 0xfff,
					  .Format = CU_AD_FORMAT_FLOAT,
					  .NumChannels = 1u << random % 3 };

	shape.Depth = shape.Height ? random >> 26 : 0;
	return shape;
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned level)
{
	return rounded(at_least_one(shape->Width >> level) * shape->NumChannels * 4, UNIT) * at_least_one(shape->Height >> level) *
	       at_least_one(shape->Depth >> level);
}

static void take_array(struct held *slot, uint64_t random)
{
	CUDA_ARRAY3D_DESCRIPTOR shape = array_shape(random);
	CUarray array = (CUarray)(uintptr_t)UNTOUCHED;
	uint64_t charge = price(level_bytes(&shape, 0));

	if (granted(cu.cuArray3DCreate_v2(&array, &shape), charge)) {
		*slot = (struct held){ .kind = ARRAY, .bytes = charge, .array = array };
		model_bytes += charge;
		return;
	}
	CHECK(array == (CUarray)(uintptr_t)UNTOUCHED);
}

static void take_mipmap(struct held *slot, uint64_t random, unsigned levels)
{
	CUDA_ARRAY3D_DESCRIPTOR shape = array_shape(random);
	CUmipmappedArray mipmap = (CUmipmappedArray)(uintptr_t)UNTOUCHED;
	uint64_t bytes = 0;

	for (unsigned level = 0; level < levels; level++)
		bytes += level_bytes(&shape, level);
	uint64_t charge = price(bytes);
	if (granted(cu.cuMipmappedArrayCreate(&mipmap, &shape, levels), charge)) {
		*slot = (struct held){ .kind = MIPMAP, .bytes = charge, .mipmap = mipmap };
		model_bytes += charge;
		return;
	}
	CHECK(mipmap == (CUmipmappedArray)(uintptr_t)UNTOUCHED);
}

static void take_pooled(struct held *slot, uint64_t bytes, bool own)
{
	CUdeviceptr address = UNTOUCHED;
	CUresult result = own ? cu.cuMemAllocFromPoolAsync(&address, bytes, own_pool, NULL) : cu.cuMemAllocAsync(&address, bytes, NULL);

	if (bytes == 0)
		return;
	CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
	if (result == CUDA_SUCCESS) {
		*slot = (struct held){ .kind = POOLED, .bytes = bytes, .address = address };
		pooled_bytes += bytes;
		CHECK(model_bytes + pooled_bytes <= free_at_start);
		return;
	}
	CHECK(address == UNTOUCHED);
}

static void take_physical(struct held *slot, uint64_t pages, bool map, bool release)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
	CUmemGenericAllocationHandle handle;
	uint64_t bytes = (pages + 1) * PAGE;
	CUdeviceptr address = 0;

	if (!granted(cu.cuMemCreate(&handle, bytes, &prop, 0), bytes))
		return;
	model_bytes += bytes;
	if (map) {
		CHECK(cu.cuMemAddressReserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS);
		CHECK(cu.cuMemMap(address, bytes, 0, handle, 0) == CUDA_SUCCESS);
	}
	if (map && release) { /* the mapping alone keeps it */
		CHECK(cu.cuMemRelease(handle) == CUDA_SUCCESS);
		handle = 0;
	}
	*slot = (struct held){ .kind = map ? MAPPED : PHYSICAL, .bytes = bytes, .address = address, .handle = handle };
}

static void give_back(struct held *slot, bool in_stream_order)
{
	switch (slot->kind) {
	case NONE: return;
	case POOLED:
		pooled_bytes -= slot->bytes;
		if (in_stream_order)
			CHECK(cu.cuMemFreeAsync(slot->address, NULL) == CUDA_SUCCESS && cu.cuStreamSynchronize(NULL) == CUDA_SUCCESS);
		else
			CHECK(cu.cuMemFree_v2(slot->address) == CUDA_SUCCESS);
		break;
	case LINEAR:
	case MANAGED:
		model_bytes -= slot->bytes;
		CHECK(cu.cuMemFree_v2(slot->address) == CUDA_SUCCESS);
		CHECK(cu.cuMemFree_v2(slot->address) != CUDA_SUCCESS); /* a second free is refused and uncharges nothing */
		break;
	case ARRAY:
		model_bytes -= slot->bytes;
		CHECK(cu.cuArrayDestroy(slot->array) == CUDA_SUCCESS);
		break;
	case MIPMAP:
		model_bytes -= slot->bytes;
		CHECK(cu.cuMipmappedArrayDestroy(slot->mipmap) == CUDA_SUCCESS);
		break;
	case MAPPED:
		CHECK(cu.cuMemUnmap(slot->address, slot->bytes) == CUDA_SUCCESS);
		CHECK(cu.cuMemAddressFree(slot->address, slot->bytes) == CUDA_SUCCESS);
		__attribute__((fallthrough));
	case PHYSICAL:
		model_bytes -= slot->bytes;
		if (slot->handle)
			CHECK(cu.cuMemRelease(slot->handle) == CUDA_SUCCESS);
	}
	slot->kind = NONE;
}

static void trim(void)
{
	CHECK(cu.cuMemPoolTrimTo(pool, 0) == CUDA_SUCCESS && cu.cuMemPoolTrimTo(own_pool, 0) == CUDA_SUCCESS);
}

/* What is charged in units, as small memory is, comes to the driver in pages all the same, which it keeps while anything of them lives: the
 * agent finds that difference and takes it off the limit. */
static uint64_t page_rest(void)
{
	uint64_t rest = 0;

	for (unsigned i = 0; i < HELD_MAX; i++)
		rest += held[i].kind >= LINEAR && held[i].kind <= MIPMAP && held[i].bytes % PAGE ? PAGE : 0;
	return rest;
}

static void check_view(void)
{
	uint64_t taken = free_at_start - free_now();

	CHECK(taken >= model_bytes);
	CHECK(physical_at_start - physical_free_now() <= free_at_start + page_rest());
	if (taken != model_bytes && !pooled_bytes) { /* what a pool keeps for later is the pool's to give back */
		trim();
		CHECK(free_at_start - free_now() == model_bytes);
	}
}

static void step(struct fuzz_reader *input)
{
	unsigned what = (unsigned)fuzz_take(input, 1);
	struct held *slot = &held[fuzz_take(input, 1) % HELD_MAX];
	uint64_t bytes = fuzz_take(input, 4) >> (what >> 4); /* of every magnitude, to 4 GiB */

	if (slot->kind != NONE) {
		give_back(slot, what & 1);
		return;
	}
	switch (what % 16) {
	case 0:
	case 1:
	case 2: take_linear(slot, bytes, false); break;
	case 3: take_linear(slot, bytes, true); break;
	case 4:
	case 5: take_pitched(slot, bytes & 0xffff, bytes >> 16); break;
	case 6:
	case 7: take_array(slot, bytes); break;
	case 8:
	case 9: take_mipmap(slot, bytes, 1 + what % 2 * 3); break;
	case 10:
	case 11: take_pooled(slot, bytes, what % 2); break;
	default: take_physical(slot, bytes >> 21, what % 16 > 13, what % 16 == 15);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_reader input = { data, bytes };

	while (input.left) {
		step(&input);
		check_view();
	}
	for (unsigned i = 0; i < HELD_MAX; i++)
		give_back(&held[i], i & 1);
	CHECK(cu.cuStreamSynchronize(NULL) == CUDA_SUCCESS);
	trim();
	CHECK(model_bytes == 0 && pooled_bytes == 0);
	CHECK(free_now() == free_at_start && physical_free_now() == physical_at_start);
	return 0;
}
