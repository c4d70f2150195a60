/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_memory.c - what device memory costs, holds and gives back. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "simulated_driver/tests/harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- what things cost ------------------------------------------------------------------------------------------------ */

static void context_costs_what_the_topology_says(void)
{
	uint64_t price = test_state()->topology.gpus[0].context_bytes;
	CUcontext first, second;
	OK(cuInit(0));
	CHECK_EQUAL(test_used(0), 0);
	OK(cuCtxCreate_v2(&first, 0, 0));
	CHECK_EQUAL(test_used(0), price);
	OK(cuCtxCreate_v2(&second, 0, 0));
	CHECK_EQUAL(test_used(0), 2 * price);
	OK(cuCtxDestroy_v2(second));
	OK(cuCtxDestroy_v2(first));
	CHECK_EQUAL(test_used(0), 0);
}

static void primary_context_lives_from_first_retain_to_last_release(void)
{
	CUcontext first, second;
	unsigned flags;
	int active;
	OK(cuInit(0));
	CHECK_EQUAL(cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuDevicePrimaryCtxRetain(&first, 0));
	OK(cuDevicePrimaryCtxRetain(&second, 0));
	CHECK(first == second);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	CHECK_EQUAL(active, 1);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	CHECK_EQUAL(active, 0);
	CHECK_EQUAL(test_used(0), 0);
}

static void small_allocations_share_two_mebibytes(void)
{
	CUdeviceptr pointers[64];
	test_context(0);
	uint64_t before = test_used(0);
	for (size_t i = 0; i < COUNT(pointers); i++)
		OK(cuMemAlloc_v2(&pointers[i], 512 * (1 + i % 7)));
	CHECK_EQUAL(test_used(0) - before, 2 * MIB);
	for (size_t i = 0; i < COUNT(pointers); i++)
		OK(cuMemFree_v2(pointers[i]));
	CHECK_EQUAL(test_used(0), before);
}

static void large_allocations_cost_whole_pages(void)
{
	CUdeviceptr pointer;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemAlloc_v2(&pointer, 5 * MIB));
	CHECK_EQUAL(test_used(0) - before, 6 * MIB);
	OK(cuMemFree_v2(pointer));
	CHECK_EQUAL(test_used(0), before);
}

static void capacity_cannot_be_exceeded(void)
{
	CUdeviceptr pointer, rest;
	test_context(0);
	uint64_t free_bytes = test_free_bytes();
	rest = 7;
	CHECK_EQUAL(cuMemAlloc_v2(&rest, free_bytes + 2 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQUAL(rest, 7);
	OK(cuMemAlloc_v2(&pointer, free_bytes / (2 * MIB) * (2 * MIB)));
	CHECK_EQUAL(cuMemAlloc_v2(&rest, 1), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemFree_v2(pointer));
	OK(cuMemAlloc_v2(&rest, 1));
	CHECK_EQUAL(cuMemFree_v2(rest + 512), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree_v2(rest));
	CHECK_EQUAL(cuMemFree_v2(rest), CUDA_ERROR_INVALID_VALUE);
}

static void pitch_makes_narrow_rows_expensive(void)
{
	CUdeviceptr pointer;
	size_t pitch;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemAllocPitch_v2(&pointer, &pitch, 4, 1 << 20, 4));
	CHECK_EQUAL(pitch, 512);
	CHECK_EQUAL(test_used(0) - before, 512 * MIB);
	OK(cuMemFree_v2(pointer));
}

static void raised_limits_cost_memory(void)
{
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 264 * MIB));
	CHECK_EQUAL(test_used(0) - before, 256 * MIB);
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB));
	CHECK_EQUAL(test_used(0), before);
	CHECK_EQUAL(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 1000 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
}

#define CALLS(declaration) ".version 8.0\n.extern .func " declaration "\n.entry work()\n{ ret; }\n"

/* The first code that needs them brings them, and the context keeps them. */
static void heap_and_print_buffer_come_with_code(void)
{
	static const char allocates[] = CALLS("(.param .b64 func_retval0) malloc"), prints[] = CALLS("(.param .b32 func_retval0) vprintf");
	CUmodule modules[3];
	CUcontext context = test_context(0);
	uint64_t before = test_used(0);
	OK(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 20 * MIB));
	CHECK_EQUAL(test_used(0) - before, 12 * MIB);
	for (unsigned i = 0; i < 2; i++)
		OK(cuModuleLoadData(&modules[i], allocates));
	CHECK_EQUAL(test_used(0) - before, 20 * MIB + 2 * MIB);
	CHECK_EQUAL(cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB), CUDA_ERROR_INVALID_VALUE);
	OK(cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 6 * MIB));
	OK(cuModuleLoadData(&modules[2], prints));
	CHECK_EQUAL(cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 8 * MIB), CUDA_ERROR_INVALID_VALUE);
	for (unsigned i = 0; i < COUNT(modules); i++)
		OK(cuModuleUnload(modules[i]));
	CHECK_EQUAL(test_used(0) - before, 26 * MIB);
	OK(cuCtxDestroy_v2(context));
	CHECK_EQUAL(test_used(0), 0);
}

static void code_without_room_for_its_heap_is_refused(void)
{
	CUdeviceptr pointer;
	CUmodule module;
	size_t free_bytes, total_bytes;
	test_context(0);
	OK(cuMemGetInfo_v2(&free_bytes, &total_bytes));
	OK(cuMemAlloc_v2(&pointer, free_bytes - 6 * MIB));
	CHECK_EQUAL(cuModuleLoadData(&module, CALLS("free")), CUDA_ERROR_SHARED_OBJECT_INIT_FAILED);
	OK(cuMemFree_v2(pointer));
	OK(cuModuleLoadData(&module, CALLS("free")));
}

static void a_fill_brings_managed_pages_to_its_device(void)
{
	CUdeviceptr pointer;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemAllocManaged(&pointer, 16 * MIB, CU_MEM_ATTACH_GLOBAL));
	OK(cuMemsetD2D8_v2(pointer, 2 * MIB, 1, 1, 8));
	CHECK_EQUAL(test_used(0) - before, 16 * MIB);
	OK(cuCtxSynchronize()); /* nothing orders the fills of two devices */
	test_context(1);
	before = test_used(1);
	OK(cuMemsetD8_v2(pointer, 1, 4 * MIB));
	CHECK_EQUAL(test_used(1) - before, 4 * MIB);
	OK(cuMemAdvise(pointer, 16 * MIB, CU_MEM_ADVISE_SET_ACCESSED_BY, 1));
	OK(cuMemsetD8_v2(pointer, 1, 16 * MIB));
	CHECK_EQUAL(test_used(1) - before, 4 * MIB); /* it uses the rest where that lies */
	OK(cuMemFree_v2(pointer));
	CHECK_EQUAL(test_used(1), before);
}

static void launch_with(CUfunction function, CUdeviceptr pointer, CUstream stream)
{
	unsigned small = 7;
	void *parameters[] = { &small, &pointer };
	OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

/* All of the allocation that a parameter points to, also from inside, for launches of every form. */
static void a_kernel_brings_managed_pages_to_its_device(void)
{
	static const char image[] = ".version 8.0\n.entry use(.param .u32 small, .param .u64 pointer)\n{ ret; }\n";
	CUdeviceptr pointer;
	CUmodule module;
	CUfunction function;
	CUstream stream;
	CUgraph graph;
	CUgraphExec exec;
	test_context(0);
	OK(cuMemAllocManaged(&pointer, 16 * MIB, CU_MEM_ATTACH_GLOBAL));
	test_context(1);
	OK(cuModuleLoadData(&module, image));
	OK(cuModuleGetFunction(&function, module, "use"));
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	uint64_t before = test_used(1);
	launch_with(function, pointer + 5 * MIB, stream);
	CHECK_EQUAL(test_used(1) - before, 16 * MIB);
	OK(cuStreamSynchronize(stream));
	OK(cuMemPrefetchAsync(pointer, 16 * MIB, CU_DEVICE_CPU, stream));
	CHECK_EQUAL(test_used(1), before);
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch_with(function, pointer, stream);
	OK(cuStreamEndCapture(stream, &graph));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CHECK_EQUAL(test_used(1), before);
	for (int round = 0; round < 2; round++) {
		OK(cuGraphLaunch(exec, stream));
		OK(cuStreamSynchronize(stream));
		CHECK_EQUAL(test_used(1) - before, 16 * MIB);
		OK(cuMemPrefetchAsync(pointer, 16 * MIB, CU_DEVICE_CPU, stream));
	}
	OK(cuMemFree_v2(pointer));
}

/* For every thread that can be resident, at the first launch, and for good. */
static void stacks_grow_to_what_a_launched_kernel_needs(void)
{
	static const char image[] =
		".version 8.0\n.entry deep()\n{ .local .align 8 .b8 depot[4096];\n .local .b32 one; }\n.entry flat()\n{ ret; }\n";
	CUmodule module;
	CUfunction deep, flat;
	int local = 0, threads = 0, multiprocessors = 0;
	size_t stack;
	test_context(0);
	uint64_t empty = test_used(0);
	OK(cuModuleLoadData(&module, image));
	OK(cuModuleGetFunction(&deep, module, "deep"));
	OK(cuModuleGetFunction(&flat, module, "flat"));
	OK(cuFuncGetAttribute(&local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, deep));
	CHECK_EQUAL(local, 4100);
	OK(cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 0));
	OK(cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
	uint64_t before = test_used(0), grown = (uint64_t)threads * (uint64_t)multiprocessors * (4112 - 1024);
	OK(cuLaunchKernel(flat, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	CHECK_EQUAL(test_used(0), before);
	for (unsigned i = 0; i < 2; i++)
		OK(cuLaunchKernel(deep, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	CHECK(test_used(0) - before >= grown && test_used(0) - before < grown + 2 * MIB);
	OK(cuCtxGetLimit(&stack, CU_LIMIT_STACK_SIZE));
	CHECK_EQUAL(stack, 4112);
	OK(cuModuleUnload(module));
	CHECK(test_used(0) - empty >= grown);
}

static void stacks_are_rounded_up(void)
{
	size_t kept;
	test_context(0);
	OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1025));
	OK(cuCtxGetLimit(&kept, CU_LIMIT_STACK_SIZE));
	CHECK_EQUAL(kept, 1040);
	OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 2048));
	OK(cuCtxGetLimit(&kept, CU_LIMIT_STACK_SIZE));
	CHECK_EQUAL(kept, 2048);
}

static void destroyed_context_takes_its_memory_along(void)
{
	CUdeviceptr pointer;
	CUcontext context = test_context(0);
	for (int i = 0; i < 100; i++)
		OK(cuMemAlloc_v2(&pointer, 1 + (size_t)i * 300000));
	OK(cuMemAllocManaged(&pointer, 4 * MIB, CU_MEM_ATTACH_GLOBAL));
	OK(cuCtxDestroy_v2(context));
	CHECK_EQUAL(test_used(0), 0);
	CHECK_EQUAL(cuMemAlloc_v2(&pointer, 1), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuCtxPushCurrent_v2(test_context(0)));
	CHECK_EQUAL(cuCtxPushCurrent_v2(context), CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

/* ---- killed processes ------------------------------------------------------------------------------------------------ */

struct holder {
	uint64_t bytes;
	_Atomic uint32_t *ready;
};

static void hold_until_killed(void *argument)
{
	struct holder *holder = argument;
	CUdeviceptr pointer;
	test_context(0);
	OK(cuMemAlloc_v2(&pointer, holder->bytes));
	atomic_fetch_add(holder->ready, 1);
	pause();
}

static void killed_process_gives_its_memory_back(void)
{
	struct holder holder = { 3 * GIB, test_shared(4) };
	uint64_t price = test_state()->topology.gpus[0].context_bytes;
	pid_t children[3];
	for (size_t i = 0; i < COUNT(children); i++)
		children[i] = test_spawn(hold_until_killed, &holder);
	test_await(holder.ready, COUNT(children));
	CHECK_EQUAL(test_used(0), 3 * (3 * GIB + price));
	for (size_t i = 0; i < COUNT(children); i++) {
		kill(children[i], SIGKILL);
		test_reap(children[i], SIGKILL);
	}
	CHECK_EQUAL(test_used(0), 0);
}

static void refused_process_finds_the_memory_of_a_killed_one(void)
{
	struct holder holder = { 12 * GIB, test_shared(4) };
	CUdeviceptr pointer;
	pid_t child = test_spawn(hold_until_killed, &holder);
	test_await(holder.ready, 1);
	test_context(0);
	CHECK_EQUAL(cuMemAlloc_v2(&pointer, 12 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
	kill(child, SIGKILL);
	test_reap(child, SIGKILL);
	OK(cuMemAlloc_v2(&pointer, 12 * GIB));      /* at once: a request that would be refused looks for dead processes first */
}

static void allocate_until_killed(void *argument)
{
	CUdeviceptr pointers[16];
	_Atomic uint32_t *ready = argument;
	test_context(0);
	atomic_fetch_add(ready, 1);
	for (;;) {
		for (size_t i = 0; i < COUNT(pointers); i++)
			OK(cuMemAlloc_v2(&pointers[i], (1 + i % 3) * MIB));
		for (size_t i = 0; i < COUNT(pointers); i++)
			OK(cuMemFree_v2(pointers[i]));
	}
}

/* Kill at random moments, most of them inside an allocation: no memory may leak, and no process may hang. */
static void kills_inside_an_allocation_leak_nothing(void)
{
	_Atomic uint32_t *ready = test_shared(4);
	unsigned seed = 1;
	for (int round = 0; round < 60; round++) {
		atomic_store(ready, 0);
		pid_t child = test_spawn(allocate_until_killed, (void *)(uintptr_t)ready);
		test_await(ready, 1);
		usleep(rand_r(&seed) % 2000u);
		kill(child, SIGKILL);
		test_reap(child, SIGKILL);
	}
	CHECK_EQUAL(test_used(0), 0);
	CHECK_EQUAL(atomic_load(&test_state()->gpus[0].repair), 0);
}

/* Die at each of the places where a kill could hit a change, which random kills meet too rarely to rely on. */
struct half_done {
	bool in_domain, in_slot;
};

static void die_half_way(void *argument)
{
	const struct half_done *half = argument;
	struct sim_state *state = test_state();
	struct sim_process self;
	int cursor = 0;
	test_context(0);
	do
		CHECK(sim_next_process(state, &cursor, &self));
	while (self.pid != getpid());
	struct sim_slot_gpu *held = &state->slots[self.slot].gpus[0];
	atomic_store(&held->intent_bytes, 64 * MIB);
	if (half->in_domain)
		atomic_fetch_add(&state->gpus[0].used_bytes, 64 * MIB);
	if (half->in_slot)
		atomic_fetch_add(&held->used_bytes, 64 * MIB);
	raise(SIGKILL);
}

static void half_done_change_of_a_dead_process_is_repaired(void)
{
	struct half_done halves[] = { { false, false }, { true, false }, { false, true }, { true, true } };
	struct holder holder = { 1 * GIB, test_shared(4) };
	uint64_t price = test_state()->topology.gpus[0].context_bytes;
	pid_t bystander;
	for (size_t i = 0; i < COUNT(halves); i++) {
		test_reap(test_spawn(die_half_way, &halves[i]), SIGKILL);
		CHECK_EQUAL(test_used(0), 0);
	}
	bystander = test_spawn(hold_until_killed, &holder);
	test_await(holder.ready, 1);
	for (size_t i = 0; i < COUNT(halves); i++) {
		test_reap(test_spawn(die_half_way, &halves[i]), SIGKILL);
		CHECK_EQUAL(test_used(0), 1 * GIB + price);
	}
	kill(bystander, SIGKILL);
	test_reap(bystander, SIGKILL);
}

static void die_with_the_lock(void *unused)
{
	(void)unused;
	test_context(0);
	sim_lock(test_state());
	atomic_fetch_add(&test_state()->gpus[0].used_bytes, 999 * MIB);
	raise(SIGKILL);
}

static void lock_of_a_dead_process_is_taken_over_and_its_damage_repaired(void)
{
	CUdeviceptr pointer;
	test_reap(test_spawn(die_with_the_lock, NULL), SIGKILL);
	CHECK_EQUAL(test_used(0), 0);
	test_context(0);
	OK(cuMemAlloc_v2(&pointer, 14 * GIB));
}

/* ---- bytes ----------------------------------------------------------------------------------------------------------- */

static void bytes_survive_the_trip(void)
{
	CUdeviceptr a, b;
	uint8_t out[4096], in[4096];
	test_context(0);
	for (size_t i = 0; i < sizeof in; i++)
		in[i] = (uint8_t)(i * 7);
	OK(cuMemAlloc_v2(&a, sizeof in));
	OK(cuMemAlloc_v2(&b, 3 * GIB));
	OK(cuMemcpyHtoD_v2(a, in, sizeof in));
	OK(cuMemcpyDtoD_v2(b + 2 * GIB + 12345, a, sizeof in));
	OK(cuMemcpyDtoH_v2(out, b + 2 * GIB + 12345, sizeof out));
	CHECK_EQUAL(memcmp(in, out, sizeof in), 0);
	OK(cuMemsetD32_v2(a + 16, 0xdeadbeef, 4));
	OK(cuMemcpy((CUdeviceptr)(uintptr_t)out, a, sizeof out));
	CHECK_EQUAL(*(uint32_t *)(void *)&out[28], 0xdeadbeef);
	CHECK_EQUAL(out[15], in[15]);
	CHECK_EQUAL(out[32], in[32]);
	CHECK_EQUAL(cuMemcpyDtoH_v2(out, a + 1, sizeof out), CUDA_ERROR_INVALID_VALUE);     /* one byte too far */
	CHECK_EQUAL(cuMemcpyHtoD_v2(a + (1 << 20), in, 1), CUDA_ERROR_INVALID_VALUE);      /* nothing there */
	CHECK_EQUAL(cuMemsetD32_v2(a + 2, 0, 1), CUDA_ERROR_INVALID_VALUE);                 /* not aligned */
}

static void rectangles_and_boxes(void)
{
	CUdeviceptr device;
	size_t pitch;
	uint8_t in[8][16], out[8][16];
	test_context(0);
	OK(cuMemAllocPitch_v2(&device, &pitch, 16, 8, 4));
	OK(cuMemsetD2D8_v2(device, pitch, 0xee, 16, 8));
	for (int row = 0; row < 8; row++)
		memset(in[row], row + 1, sizeof in[row]);
	CUDA_MEMCPY2D copy = { .srcMemoryType = CU_MEMORYTYPE_HOST,
			       .srcHost = in,
			       .srcPitch = 16,
			       .dstMemoryType = CU_MEMORYTYPE_DEVICE,
			       .dstDevice = device,
			       .dstPitch = pitch,
			       .dstXInBytes = 4,
			       .dstY = 2,
			       .WidthInBytes = 8,
			       .Height = 3 };
	OK(cuMemcpy2D_v2(&copy));
	CUDA_MEMCPY2D back = { .srcMemoryType = CU_MEMORYTYPE_DEVICE,
			       .srcDevice = device,
			       .srcPitch = pitch,
			       .dstMemoryType = CU_MEMORYTYPE_HOST,
			       .dstHost = out,
			       .dstPitch = 16,
			       .WidthInBytes = 16,
			       .Height = 8 };
	OK(cuMemcpy2D_v2(&back));
	CHECK_EQUAL(out[2][3], 0xee);
	CHECK_EQUAL(out[2][4], 1);
	CHECK_EQUAL(out[4][11], 3);
	CHECK_EQUAL(out[4][12], 0xee);
	CHECK_EQUAL(out[5][5], 0xee);
	copy.Height = 7;
	CHECK_EQUAL(cuMemcpy2D_v2(&copy), CUDA_ERROR_INVALID_VALUE);
}

static void arrays_hold_texels_and_cost_memory(void)
{
	CUarray array, level;
	CUmipmappedArray mipmap;
	CUDA_ARRAY_MEMORY_REQUIREMENTS needs;
	uint8_t in[64] = { 0 }, out[64];
	test_context(0);
	uint64_t before = test_used(0);
	CUDA_ARRAY3D_DESCRIPTOR shape = { .Width = 1024, .Height = 1024, .Depth = 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4 };
	shape.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
	OK(cuArray3DCreate_v2(&array, &shape));
	OK(cuArrayGetMemoryRequirements(&needs, array, 0));
	CHECK_EQUAL(needs.size, 256 * MIB);
	CHECK_EQUAL(test_used(0), before);
	CHECK_EQUAL(cuMemcpyHtoA_v2(array, 0, in, sizeof in), CUDA_ERROR_INVALID_VALUE);
	OK(cuArrayDestroy(array));
	shape.Flags = 0;
	OK(cuArray3DCreate_v2(&array, &shape));
	CHECK_EQUAL(cuArrayGetMemoryRequirements(&needs, array, 0), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(test_used(0) - before, 256 * MIB);
	memset(in, 42, sizeof in);
	OK(cuMemcpyHtoA_v2(array, 128, in, sizeof in));
	OK(cuMemcpyAtoH_v2(out, array, 128, sizeof out));
	CHECK_EQUAL(memcmp(in, out, sizeof in), 0);
	OK(cuArrayDestroy(array));
	CHECK_EQUAL(cuArrayDestroy(array), CUDA_ERROR_INVALID_HANDLE);
	shape.Depth = 0;
	shape.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
	OK(cuMipmappedArrayCreate(&mipmap, &shape, 11));
	OK(cuMipmappedArrayGetMemoryRequirements(&needs, mipmap, 0));
	CHECK_BETWEEN(needs.size, 21 * MIB, 22 * MIB);
	OK(cuMipmappedArrayDestroy(mipmap));
	shape.Flags = 0;
	OK(cuMipmappedArrayCreate(&mipmap, &shape, 11));
	CHECK_EQUAL(cuMipmappedArrayGetMemoryRequirements(&needs, mipmap, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMipmappedArrayGetLevel(&level, mipmap, 3));
	OK(cuArray3DGetDescriptor_v2(&shape, level));
	CHECK_EQUAL(shape.Width, 128);
	OK(cuMipmappedArrayDestroy(mipmap));
	CHECK_EQUAL(test_used(0), before);
}

/* Programs linked with them start only on a driver that exports them; no image has one since CUDA 12. */
static void texture_reference_keeps_its_settings(void)
{
	CUtexref texture;
	CUarray array, bound;
	CUdeviceptr buffer, address;
	CUarray_format format;
	CUaddress_mode mode;
	CUfilter_mode filter;
	unsigned int flags;
	size_t offset = 1;
	int channels;
	CUDA_ARRAY_DESCRIPTOR shape = { .Width = 64, .Height = 64, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 4 };

	test_context(0);
	OK(cuTexRefCreate(&texture));
	CHECK_EQUAL(cuTexRefGetArray(&bound, texture), CUDA_ERROR_INVALID_VALUE);
	OK(cuArrayCreate_v2(&array, &shape));
	OK(cuTexRefSetArray(texture, array, CU_TRSA_OVERRIDE_FORMAT));
	OK(cuTexRefGetArray(&bound, texture));
	OK(cuTexRefGetFormat(&format, &channels, texture));
	CHECK(bound == array && format == CU_AD_FORMAT_UNSIGNED_INT8 && channels == 4);
	OK(cuMemAlloc_v2(&buffer, 4096));
	OK(cuTexRefSetAddress_v2(&offset, texture, buffer, 4096));
	OK(cuTexRefGetAddress_v2(&address, texture));
	CHECK(offset == 0 && address == buffer);
	CHECK_EQUAL(cuTexRefSetFormat(texture, format, 5), CUDA_ERROR_INVALID_VALUE);
	OK(cuTexRefSetAddressMode(texture, 2, CU_TR_ADDRESS_MODE_MIRROR));
	OK(cuTexRefGetAddressMode(&mode, texture, 2));
	CHECK_EQUAL(cuTexRefSetAddressMode(texture, 3, CU_TR_ADDRESS_MODE_MIRROR), CUDA_ERROR_INVALID_VALUE);
	OK(cuTexRefSetFilterMode(texture, CU_TR_FILTER_MODE_LINEAR));
	OK(cuTexRefGetFilterMode(&filter, texture));
	OK(cuTexRefSetFlags(texture, 2));
	OK(cuTexRefGetFlags(&flags, texture));
	CHECK(mode == CU_TR_ADDRESS_MODE_MIRROR && filter == CU_TR_FILTER_MODE_LINEAR && flags == 2);
	OK(cuTexRefDestroy(texture));
	CHECK_EQUAL(cuTexRefDestroy(NULL), CUDA_ERROR_INVALID_VALUE);
}

static void pointer_attributes_are_reported(void)
{
	CUdeviceptr device, managed, base;
	void *host;
	size_t bytes;
	unsigned type, ordinal;
	CUcontext context = test_context(1), owner;
	OK(cuMemAlloc_v2(&device, 10000));
	OK(cuMemAllocManaged(&managed, 10000, CU_MEM_ATTACH_GLOBAL));
	OK(cuMemAllocHost_v2(&host, 10000));
	OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 777));
	CHECK_EQUAL(type, CU_MEMORYTYPE_DEVICE);
	OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device + 777));
	CHECK_EQUAL(ordinal, 1);
	OK(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, device));
	CHECK(owner == context);
	OK(cuMemGetAddressRange_v2(&base, &bytes, device + 9999));
	CHECK(base == device && bytes == 10000);
	CHECK_EQUAL(cuMemGetAddressRange_v2(&base, &bytes, device + 10000), CUDA_ERROR_NOT_FOUND);
	OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_IS_MANAGED, managed));
	CHECK_EQUAL(type, 1);
	*(volatile char *)(uintptr_t)managed = 3;       /* the CPU may touch managed memory */
	OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)host + 1));
	CHECK_EQUAL(type, CU_MEMORYTYPE_HOST);
	CHECK_EQUAL(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)&type),
		    CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFreeHost(host));
	CHECK_EQUAL(cuMemFreeHost(host), CUDA_ERROR_INVALID_VALUE);
}

static void registered_host_memory_is_known(void)
{
	static char memory[8192];
	CUdeviceptr pointer;
	test_context(0);
	OK(cuMemHostRegister_v2(memory, sizeof memory, CU_MEMHOSTREGISTER_DEVICEMAP));
	CHECK_EQUAL(cuMemHostRegister_v2(memory + 100, 10, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	OK(cuMemHostGetDevicePointer_v2(&pointer, memory, 0));
	CHECK_EQUAL(pointer, (CUdeviceptr)(uintptr_t)memory);
	OK(cuMemHostUnregister(memory));
	CHECK_EQUAL(cuMemHostUnregister(memory), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

static void managed_memory_is_charged_where_it_is(void)
{
	CUdeviceptr pointer;
	int where;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemAllocManaged(&pointer, 100 * MIB, CU_MEM_ATTACH_GLOBAL));
	CHECK_EQUAL(test_used(0), before);
	OK(cuMemPrefetchAsync(pointer, 40 * MIB, 0, NULL));
	CHECK_EQUAL(test_used(0) - before, 40 * MIB);
	OK(cuMemRangeGetAttribute(&where, sizeof where, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, pointer, 1));
	CHECK_EQUAL(where, 0);
	OK(cuMemPrefetchAsync(pointer, 100 * MIB, CU_DEVICE_CPU, NULL));
	CHECK_EQUAL(test_used(0), before);
	OK(cuMemAllocManaged(&pointer, 60 * GIB, CU_MEM_ATTACH_GLOBAL));    /* more than the card: oversubscription */
	OK(cuMemPrefetchAsync(pointer, 60 * GIB, 0, NULL));
	CHECK(test_free_bytes() < 8 * GIB);
	OK(cuMemFree_v2(pointer));
	CHECK_EQUAL(test_used(0), before);
	/* what is small shares a page with others, as device memory does */
	const uint64_t sizes[][2] = { { 5000, 5120 }, { MIB, MIB }, { MIB + 1, 2 * MIB }, { 3 * MIB, 4 * MIB } };
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		OK(cuMemAllocManaged(&pointer, sizes[i][0], CU_MEM_ATTACH_GLOBAL));
		OK(cuMemPrefetchAsync(pointer, sizes[i][0], 0, NULL));
		CHECK_EQUAL(test_used(0) - before, sizes[i][1]);
		OK(cuMemFree_v2(pointer));
		CHECK_EQUAL(test_used(0), before);
	}
}

static void batch_copies_each_or_names_the_first_that_fails(void)
{
	CUstream stream;
	CUdeviceptr device;
	uint32_t *host;
	size_t failed, first[] = { 0, 1 };
	test_context(0);
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	OK(cuMemAlloc_v2(&device, 4096));
	OK(cuMemAllocHost_v2((void **)&host, 4096));
	CUmemcpyAttributes attributes[] = { { .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM },
					    { .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL } };
	CUdeviceptr at = (CUdeviceptr)(uintptr_t)host, to[] = { device, device + 256, at + 2048 }, from[] = { at, at + 512, device + 1024 };
	size_t bytes[] = { 128, 128, 4 };
	OK(cuMemsetD32_v2(device + 1024, 77, 1));
	host[0] = 11;
	host[128] = 22;
	OK(cuMemcpyBatchAsync_v2(to, from, bytes, 3, attributes, first, 2, stream));
	host[0] = host[128] = 0;        /* all read: one of them is only there during the call */
	OK(cuStreamSynchronize(stream));
	OK(cuMemcpyDtoH_v2(&host[1], device, 4));
	OK(cuMemcpyDtoH_v2(&host[2], device + 256, 4));
	CHECK_EQUAL(host[1], 11);
	CHECK_EQUAL(host[2], 22);
	CHECK_EQUAL(host[512], 77);
	host[0] = 33;
	OK(cuMemcpyWithAttributesAsync(device, at, 4, &attributes[1], stream));
	host[0] = 0;
	OK(cuStreamSynchronize(stream));
	OK(cuMemcpyDtoH_v2(&host[1], device, 4));
	CHECK_EQUAL(host[1], 33);
	CHECK_EQUAL(cuMemcpyWithAttributesAsync(device, at, 4, NULL, stream), CUDA_ERROR_INVALID_VALUE);
	to[1] = device + 4000;
	CHECK_EQUAL(cuMemcpyBatchAsync(to, from, bytes, 3, attributes, first, 2, &failed, stream), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(failed, 1);
	first[1] = 0;
	CHECK_EQUAL(cuMemcpyBatchAsync(to, from, bytes, 3, attributes, first, 2, &failed, stream), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(failed, SIZE_MAX);
	CHECK_EQUAL(cuMemcpyBatchAsync_v2(to, from, bytes, 1, attributes, first, 1, NULL), CUDA_ERROR_INVALID_VALUE);
}

/* ---- pools ----------------------------------------------------------------------------------------------------------- */

static uint64_t pool_value(CUmemoryPool pool, CUmemPool_attribute attribute)
{
	cuuint64_t value;
	OK(cuMemPoolGetAttribute(pool, attribute, &value));
	return value;
}

static void pool_keeps_up_to_its_threshold(void)
{
	CUdeviceptr pointer;
	CUmemoryPool pool;
	CUstream stream;
	cuuint64_t all = UINT64_MAX, none = 0;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	OK(cuMemAllocAsync(&pointer, 100 * MIB, stream));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 100 * MIB);
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 128 * MIB);
	CHECK_EQUAL(test_used(0) - before, 128 * MIB);
	OK(cuMemFreeAsync(pointer, stream));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(test_used(0), before);
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
	OK(cuMemAllocAsync(&pointer, 100 * MIB, stream));
	OK(cuMemFreeAsync(pointer, stream));
	OK(cuStreamSynchronize(stream));
	CHECK_EQUAL(test_used(0) - before, 128 * MIB);
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 128 * MIB);
	OK(cuMemPoolTrimTo(pool, 0));
	CHECK_EQUAL(test_used(0), before);
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &none));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 0);
}

static void pool_reuses_memory_across_streams_in_order(void)
{
	CUstream a, b;
	CUdeviceptr first, second;
	CUmemoryPool pool;
	uint32_t out = 0;
	test_context(0);
	CUfunction spin = test_spin();
	OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	OK(cuMemAllocAsync(&first, 32 * MIB, a));
	OK(test_launch(spin, 20000, a));
	OK(cuMemsetD32Async(first, 1, 1, a));           /* lands in 20 ms */
	OK(cuMemFreeAsync(first, a));
	OK(cuMemAllocAsync(&second, 32 * MIB, b));
	CHECK_EQUAL(second, first);
	OK(cuMemsetD32Async(second, 2, 1, b));          /* must not land before the other */
	OK(cuStreamSynchronize(a));
	OK(cuStreamSynchronize(b));
	OK(cuMemcpyDtoH_v2(&out, second, 4));
	CHECK_EQUAL(out, 2);
	OK(cuDeviceGetMemPool(&pool, 0));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 32 * MIB);
	OK(cuMemFree_v2(second));
}

static void own_pool_is_charged_and_ends_with_its_last_allocation(void)
{
	CUmemoryPool pool;
	CUdeviceptr pointer, more;
	CUmemPoolProps properties = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				      .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
				      .maxSize = 64 * MIB };
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemPoolCreate(&pool, &properties));
	OK(cuMemAllocFromPoolAsync(&pointer, 40 * MIB, pool, NULL));
	CHECK_EQUAL(test_used(0) - before, 64 * MIB);
	CHECK_EQUAL(cuMemAllocFromPoolAsync(&more, 40 * MIB, pool, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemPoolDestroy(pool));
	CHECK_EQUAL(cuMemAllocFromPoolAsync(&more, 1, pool, NULL), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(test_used(0) - before, 40 * MIB);   /* what was unused went back before the refusal */
	OK(cuMemFreeAsync(pointer, NULL));
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(test_used(0), before);
}

static void memory_kept_by_pools_makes_no_request_fail(void)
{
	CUdeviceptr pointer;
	CUmemoryPool pool;
	cuuint64_t all = UINT64_MAX;
	test_context(0);
	uint64_t free_bytes = test_free_bytes() / (32 * MIB) * (32 * MIB);
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
	OK(cuMemAllocAsync(&pointer, free_bytes, NULL));
	OK(cuMemFreeAsync(pointer, NULL));
	OK(cuStreamSynchronize(NULL));
	CHECK(test_free_bytes() < 32 * MIB);
	OK(cuMemAlloc_v2(&pointer, free_bytes));
}

/* The same numbers in every run. */
static uint64_t draw(uint64_t *seed, uint64_t below)
{
	*seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (*seed >> 33) % below;
}

static void blocks_of_any_size_fill_the_card(void)
{
	static CUdeviceptr blocks[16384];
	uint64_t sizes[40] = { 1, 2, 3, 16, 17, 20, 31, 32, 33, 64, 65, 127, 129, 250, 257, 300, 341, 345, 511, 512 }, seed = 1;
	for (size_t i = 20; i < COUNT(sizes); i++)
		sizes[i] = 1 + draw(&seed, 512);
	test_context(0);
	uint64_t before = test_used(0), free_bytes = test_free_bytes();
	for (size_t i = 0; i < COUNT(sizes); i++) {
		size_t count = 0;
		while (count < COUNT(blocks) && cuMemAllocAsync(&blocks[count], sizes[i] * MIB, NULL) == CUDA_SUCCESS)
			count++;
		CHECK_BETWEEN(count, free_bytes / 100 * 95 / (sizes[i] * MIB), free_bytes / (sizes[i] * MIB));
		for (size_t block = 0; block < count; block++)
			OK(cuMemFreeAsync(blocks[block], NULL));
		OK(cuStreamSynchronize(NULL));
		CHECK_EQUAL(test_used(0), before);
	}
}

#define MIXED 400

struct block {
	CUdeviceptr address;
	uint64_t bytes;
	uint8_t tag;
};

static void fill_ends(const struct block *block)
{
	OK(cuMemsetD8Async(block->address, block->tag, 1, NULL));
	OK(cuMemsetD8Async(block->address + block->bytes - 1, block->tag, 1, NULL));
}

static void check_block(const struct block *block)
{
	uint8_t first, last;
	CUdeviceptr start;
	OK(cuMemcpyDtoH_v2(&first, block->address, 1));
	OK(cuMemcpyDtoH_v2(&last, block->address + block->bytes - 1, 1));
	CHECK_EQUAL(first, block->tag);
	CHECK_EQUAL(last, block->tag);
	OK(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, block->address + block->bytes / 2));
	CHECK_EQUAL(start, block->address);
}

/* One allocation or free; a refusal only when the card has no pages for it. */
static void allocate_or_free(struct block *block, uint64_t *seed)
{
	if (block->bytes) {
		check_block(block);
		OK(cuMemFreeAsync(block->address, NULL));
		block->bytes = 0;
		return;
	}
	uint64_t mib = 1 + draw(seed, draw(seed, 4) ? 64 : 512), bytes = draw(seed, 3) ? mib * MIB : mib * 4099;
	CUresult result = cuMemAllocAsync(&block->address, bytes, NULL);
	if (result == CUDA_SUCCESS) {
		*block = (struct block){ block->address, bytes, (uint8_t)draw(seed, 256) };
		fill_ends(block);
	} else {
		CHECK_EQUAL(result, CUDA_ERROR_OUT_OF_MEMORY);
		CHECK(test_free_bytes() < bytes + 2 * MIB);
	}
}

static void mixed_blocks_neither_overlap_nor_waste_pages(void)
{
	static struct block blocks[MIXED];
	CUmemoryPool pool;
	cuuint64_t all = UINT64_MAX;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	for (uint64_t seed = 1; seed <= 4; seed++) {
		uint64_t state = seed, live = 0, used = 0;
		OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, seed % 2 ? &all : &(cuuint64_t){ 0 }));
		for (int step = 0; step < 2000; step++) {
			allocate_or_free(&blocks[draw(&state, MIXED)], &state);
			if (step % 97 == 0)
				OK(cuStreamSynchronize(NULL));
			CHECK_EQUAL(test_used(0) - before, pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
		}
		for (int i = 0; i < MIXED; i++) {
			live += blocks[i].bytes != 0;
			used += blocks[i].bytes;
		}
		OK(cuStreamSynchronize(NULL));
		OK(cuMemPoolTrimTo(pool, 0));
		CHECK_BETWEEN(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), used, used + (live + 1) * 4 * MIB);
		for (int i = 0; i < MIXED; i++)
			if (blocks[i].bytes)
				allocate_or_free(&blocks[i], &state);
		OK(cuStreamSynchronize(NULL));
		OK(cuMemPoolTrimTo(pool, 0));
		CHECK_EQUAL(test_used(0), before);
	}
}

static void freed_pieces_go_back_above_the_threshold_and_no_more(void)
{
	CUdeviceptr blocks[8];
	CUmemoryPool pool;
	test_context(0);
	OK(cuDeviceGetDefaultMemPool(&pool, 0));
	for (size_t i = 0; i < COUNT(blocks); i++)
		OK(cuMemAllocAsync(&blocks[i], 20 * MIB, NULL));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 160 * MIB); /* five pieces, and nothing between the blocks */
	for (size_t i = 0; i < COUNT(blocks); i++)
		if (i != 3)
			OK(cuMemFreeAsync(blocks[i], NULL));
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &(cuuint64_t){ 100 * MIB }));
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 128 * MIB); /* one piece less; another would be too much */
	OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &(cuuint64_t){ 0 }));
	OK(cuMemAllocAsync(&blocks[0], 1, NULL));
	OK(cuMemFreeAsync(blocks[0], NULL));
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 64 * MIB); /* the fourth block lies in two pieces */
	OK(cuMemPoolTrimTo(pool, 0));
	CHECK_EQUAL(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 20 * MIB); /* to the page, when asked */
}

/* ---- virtual memory management --------------------------------------------------------------------------------------- */

static CUmemAllocationProp on_device(CUdevice ordinal, CUmemAllocationHandleType exported)
{
	return (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				      .requestedHandleTypes = exported,
				      .location = { CU_MEM_LOCATION_TYPE_DEVICE, ordinal } };
}

static void allow(CUdeviceptr address, size_t bytes)
{
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	OK(cuMemSetAccess(address, bytes, &access, 1));
}

static void physical_memory_lives_until_its_last_handle_and_mapping(void)
{
	CUmemAllocationProp properties = on_device(0, CU_MEM_HANDLE_TYPE_NONE);
	CUmemGenericAllocationHandle handle, again;
	CUdeviceptr range;
	size_t granularity;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	CHECK_EQUAL(granularity, 2 * MIB);
	CHECK_EQUAL(cuMemCreate(&handle, 3 * MIB, &properties, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAddressReserve(&range, 1 * GIB, 0, 0, 0));
	CHECK_EQUAL(test_used(0), before);
	OK(cuMemCreate(&handle, 20 * MIB, &properties, 0));
	CHECK_EQUAL(test_used(0) - before, 20 * MIB);
	OK(cuMemMap(range + 4 * MIB, 20 * MIB, 0, handle, 0));
	CHECK_EQUAL(cuMemMap(range + 8 * MIB, 20 * MIB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemRelease(handle));
	CHECK_EQUAL(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(test_used(0) - before, 20 * MIB);
	OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(range + 5 * MIB)));
	CHECK_EQUAL(again, handle);
	CHECK_EQUAL(cuMemAddressFree(range, 1 * GIB), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuMemUnmap(range + 4 * MIB, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemUnmap(range + 4 * MIB, 20 * MIB));
	CHECK_EQUAL(test_used(0) - before, 20 * MIB);
	OK(cuMemRelease(again));
	CHECK_EQUAL(test_used(0), before);
	OK(cuMemAddressFree(range, 1 * GIB));
}

static void handles_for_the_fabric_need_a_channel(void)
{
	test_context(0);
	size_t granularity = 0;
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp properties = on_device(0, CU_MEM_HANDLE_TYPE_FABRIC);
	OK(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	CHECK_EQUAL(granularity, 2 * MIB);
	CHECK_EQUAL(cuMemCreate(&handle, granularity, &properties, 0), CUDA_ERROR_NOT_PERMITTED);
}

static void mappings_show_the_same_bytes(void)
{
	CUmemAllocationProp properties = on_device(0, CU_MEM_HANDLE_TYPE_NONE);
	CUmemGenericAllocationHandle handle;
	CUdeviceptr range;
	uint32_t out = 0;
	test_context(0);
	OK(cuMemAddressReserve(&range, 16 * MIB, 0, 0, 0));
	OK(cuMemCreate(&handle, 4 * MIB, &properties, 0));
	OK(cuMemMap(range, 4 * MIB, 0, handle, 0));
	CHECK_EQUAL(cuMemsetD32_v2(range, 7, 4), CUDA_ERROR_INVALID_VALUE); /* mapped, but access was not given */
	allow(range, 4 * MIB);
	OK(cuMemsetD32_v2(range, 7, (4 * MIB) / 4));
	OK(cuMemMap(range + 8 * MIB, 4 * MIB, 0, handle, 0));
	allow(range + 8 * MIB, 4 * MIB);
	OK(cuMemcpyDtoH_v2(&out, range + 12 * MIB - 4, 4));
	CHECK_EQUAL(out, 7);
	OK(cuMemUnmap(range, 4 * MIB));
	CHECK_EQUAL(cuMemcpyDtoH_v2(&out, range, 4), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemUnmap(range + 8 * MIB, 4 * MIB));
	OK(cuMemMap(range, 4 * MIB, 0, handle, 0));
	allow(range, 4 * MIB);
	OK(cuMemsetD8_v2(range, 1, 1));
	OK(cuMemcpyDtoH_v2(&out, range, 4));
	CHECK_EQUAL(out, 0x01);
	CHECK_EQUAL(out >> 8, 0);
	OK(cuMemcpyDtoH_v2(&out, range + 8, 4));
	CHECK_EQUAL(out, 7);
}

/* ---- between processes ----------------------------------------------------------------------------------------------- */

static void send_fd(int socket, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof fd)];
	struct iovec data = { &byte, 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	memset(control, 0, sizeof control);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(header), &fd, sizeof fd);
	CHECK_EQUAL(sendmsg(socket, &message, 0), 1);
}

static int receive_fd(int socket)
{
	int fd = -1;
	char byte, control[CMSG_SPACE(sizeof fd)];
	struct iovec data = { &byte, 1 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	CHECK_EQUAL(recvmsg(socket, &message, 0), 1);
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
	return fd;
}

struct meeting {
	int sockets[2];
	_Atomic uint32_t step;
	CUipcMemHandle handle;
};

static void export_and_exit(void *argument)
{
	struct meeting *meeting = argument;
	CUmemAllocationProp properties = on_device(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	CUmemGenericAllocationHandle handle;
	CUdeviceptr range;
	int fd;
	test_context(0);
	OK(cuMemAddressReserve(&range, 32 * MIB, 0, 0, 0));
	OK(cuMemCreate(&handle, 32 * MIB, &properties, 0));
	OK(cuMemMap(range, 32 * MIB, 0, handle, 0));
	allow(range, 32 * MIB);
	OK(cuMemsetD32_v2(range + 16 * MIB, 11, 1));
	OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	OK(cuMemsetD32_v2(range + 16 * MIB + 4, 12, 1)); /* after the move to a file, through the old mapping */
	OK(cuStreamSynchronize(NULL));
	send_fd(meeting->sockets[0], fd);
	test_await(&meeting->step, 1);
}

static void exported_memory_outlives_its_exporter(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	CUmemGenericAllocationHandle handle;
	CUdeviceptr range;
	uint32_t out[2];
	CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, meeting->sockets), 0);
	pid_t child = test_spawn(export_and_exit, meeting);
	int fd = receive_fd(meeting->sockets[1]);
	test_context(0);
	uint64_t price = test_state()->topology.gpus[0].context_bytes;
	CHECK_EQUAL(test_used(0), 2 * price + 32 * MIB);
	OK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	CHECK_EQUAL(test_used(0), 2 * price + 32 * MIB);
	atomic_store(&meeting->step, 1);
	test_reap(child, 0);
	CHECK_EQUAL(test_used(0), price + 32 * MIB);
	OK(cuMemAddressReserve(&range, 32 * MIB, 0, 0, 0));
	OK(cuMemMap(range, 32 * MIB, 0, handle, 0));
	allow(range, 32 * MIB);
	OK(cuMemcpyDtoH_v2(out, range + 16 * MIB, sizeof out));
	CHECK_EQUAL(out[0], 11);
	CHECK_EQUAL(out[1], 12);
	OK(cuMemRelease(handle));
	OK(cuMemUnmap(range, 32 * MIB));
	CHECK_EQUAL(test_used(0), price);
}

static void open_ipc_handle(void *argument)
{
	struct meeting *meeting = argument;
	CUdeviceptr pointer;
	uint32_t value;
	test_await(&meeting->step, 1);
	test_context(0);
	OK(cuIpcOpenMemHandle_v2(&pointer, meeting->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuMemcpyDtoH_v2(&value, pointer, 4));
	CHECK_EQUAL(value, 1234);
	OK(cuMemsetD32_v2(pointer + 4, 4321, 1));
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(cuMemFree_v2(pointer), CUDA_ERROR_INVALID_VALUE);
	atomic_store(&meeting->step, 2);
	test_await(&meeting->step, 3);
	OK(cuIpcCloseMemHandle(pointer));
	CHECK_EQUAL(cuIpcCloseMemHandle(pointer), CUDA_ERROR_INVALID_VALUE);
}

static void ipc_handle_opens_in_another_process(void)
{
	struct meeting *meeting = test_shared(sizeof *meeting);
	CUdeviceptr pointer, own;
	uint32_t value;
	pid_t child = test_spawn(open_ipc_handle, meeting);
	test_context(0);
	uint64_t price = test_state()->topology.gpus[0].context_bytes;
	OK(cuMemAlloc_v2(&pointer, 1 * MIB));
	OK(cuMemsetD32_v2(pointer, 1234, 1));
	OK(cuIpcGetMemHandle(&meeting->handle, pointer));
	CHECK_EQUAL(cuIpcOpenMemHandle_v2(&own, meeting->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_CONTEXT);
	atomic_store(&meeting->step, 1);
	test_await(&meeting->step, 2);
	OK(cuMemcpyDtoH_v2(&value, pointer + 4, 4));
	CHECK_EQUAL(value, 4321);
	CHECK_EQUAL(test_used(0), 2 * price + 2 * MIB);
	OK(cuMemFree_v2(pointer));
	CHECK_EQUAL(test_used(0), 2 * price + 2 * MIB); /* the other process still has it */
	atomic_store(&meeting->step, 3);
	test_reap(child, 0);
	CHECK_EQUAL(test_used(0), price);
}

/* ---- graphs' memory -------------------------------------------------------------------------------------------------- */

static uint64_t graph_memory(CUgraphMem_attribute attribute)
{
	cuuint64_t value;
	OK(cuDeviceGetGraphMemAttribute(0, attribute, &value));
	return value;
}

static void graph_memory_is_charged_at_launch_and_trimmed(void)
{
	CUgraph graph;
	CUgraphExec exec;
	CUgraphNode allocate, fill, release;
	CUcontext context = test_context(0);
	uint64_t before = test_used(0);
	CUDA_MEM_ALLOC_NODE_PARAMS memory = { .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
							     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } },
					      .bytesize = 64 * MIB };
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddMemAllocNode(&allocate, graph, NULL, 0, &memory));
	CUDA_MEMSET_NODE_PARAMS zero = { .dst = memory.dptr, .elementSize = 1, .width = 4096, .height = 1 };
	OK(cuGraphAddMemsetNode(&fill, graph, &allocate, 1, &zero, context));
	OK(cuGraphAddMemFreeNode(&release, graph, &fill, 1, memory.dptr));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CHECK_EQUAL(test_used(0), before);
	OK(cuGraphLaunch(exec, NULL));
	OK(cuGraphLaunch(exec, NULL));
	OK(cuStreamSynchronize(NULL));
	CHECK_EQUAL(test_used(0) - before, 64 * MIB);
	CHECK_EQUAL(graph_memory(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 64 * MIB);
	CHECK_EQUAL(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
	CHECK_EQUAL(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 64 * MIB);
	OK(cuDeviceGraphMemTrim(0));
	CHECK_EQUAL(test_used(0), before);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
}

static void graph_allocation_outside_the_card_is_refused_at_launch(void)
{
	CUgraph graph;
	CUgraphExec exec;
	CUgraphNode first, second;
	CUDA_MEM_ALLOC_NODE_PARAMS memory = { .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
							     .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } },
					      .bytesize = 9 * GIB };
	test_context(0);
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddMemAllocNode(&first, graph, NULL, 0, &memory));
	OK(cuGraphAddMemAllocNode(&second, graph, NULL, 0, &memory));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CHECK_EQUAL(cuGraphLaunch(exec, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
}

static void unfreed_graph_allocation_must_be_freed_before_the_next_launch(void)
{
	CUgraph graph;
	CUgraphExec exec;
	CUstream stream;
	CUdeviceptr pointer;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	OK(cuMemAllocAsync(&pointer, 10 * MIB, stream));
	OK(cuMemsetD8Async(pointer, 5, 10, stream));
	OK(cuStreamEndCapture(stream, &graph));
	OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	OK(cuGraphLaunch(exec, stream));
	CHECK_EQUAL(cuGraphLaunch(exec, stream), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 10 * MIB);
	OK(cuMemFreeAsync(pointer, stream));
	OK(cuGraphLaunch(exec, stream));
	OK(cuStreamSynchronize(stream));
	OK(cuMemFree_v2(pointer));
	CHECK_EQUAL(graph_memory(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
	OK(cuGraphExecDestroy(exec));
	OK(cuGraphDestroy(graph));
	OK(cuDeviceGraphMemTrim(0));
	CHECK_EQUAL(test_used(0), before);
}

/* ---- the oldest calls ------------------------------------------------------------------------------------------------ */

static void calls_without_suffix_are_charged_too(void)
{
	CUdeviceptr_v1 pointer;
	uint32_t in = 99, out = 0;
	test_context(0);
	uint64_t before = test_used(0);
	OK(cuMemAlloc(&pointer, 5 * MIB));
	CHECK_EQUAL(test_used(0) - before, 6 * MIB);
	OK(cuMemcpyHtoD(pointer, &in, 4));
	OK(cuMemcpyDtoH(&out, pointer, 4));
	CHECK_EQUAL(out, 99);
	OK(cuMemFree(pointer));
	CHECK_EQUAL(test_used(0), before);
}

/* ---- MIG ------------------------------------------------------------------------------------------------------------- */

static void mig_instance_is_the_device(void)
{
	const struct sim_state *state = test_state();
	const struct sim_compute_instance *device = &state->gpus[6].mig.devices[0];
	char name[128];
	int count, sms;
	size_t total;
	CUdeviceptr pointer;
	setenv("ALIQUOT_SIM_DEVICE_0", device->uuid, 1);
	OK(cuInit(0));
	OK(cuDeviceGetCount(&count));
	CHECK_EQUAL(count, 1);
	OK(cuDeviceGetName(name, sizeof name, 0));
	CHECK(strstr(name, "MIG 1g.10gb"));
	OK(cuDeviceTotalMem_v2(&total, 0));
	CHECK_EQUAL(total, 9728 * MIB);
	OK(cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
	CHECK_EQUAL(sms, 14);
	test_context(0);
	CHECK_EQUAL(cuMemAlloc_v2(&pointer, 9728 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemAlloc_v2(&pointer, 9 * GIB));
	CHECK_EQUAL(atomic_load(&state->gpus[6].mig.gpu_instances[device->gpu_instance_id].used_bytes),
		    9 * GIB + state->topology.gpus[6].context_bytes);
	CHECK_EQUAL(test_used(6), 0);
}

static const struct test_case cases[] = {
	CASE(context_costs_what_the_topology_says, "t4x2"),
	CASE(primary_context_lives_from_first_retain_to_last_release, "t4x2"),
	CASE(small_allocations_share_two_mebibytes, "t4x2"),
	CASE(large_allocations_cost_whole_pages, "t4x2"),
	CASE(capacity_cannot_be_exceeded, "t4x2"),
	CASE(pitch_makes_narrow_rows_expensive, "t4x2"),
	CASE(raised_limits_cost_memory, "t4x2"),
	CASE(heap_and_print_buffer_come_with_code, "t4x2"),
	CASE(code_without_room_for_its_heap_is_refused, "t4x2"),
	CASE(a_fill_brings_managed_pages_to_its_device, "t4x2"),
	CASE(a_kernel_brings_managed_pages_to_its_device, "t4x2"),
	CASE(stacks_grow_to_what_a_launched_kernel_needs, "t4x2"),
	CASE(stacks_are_rounded_up, "t4x2"),
	CASE(destroyed_context_takes_its_memory_along, "t4x2"),
	CASE(killed_process_gives_its_memory_back, "t4x2"),
	CASE(refused_process_finds_the_memory_of_a_killed_one, "t4x2"),
	CASE(kills_inside_an_allocation_leak_nothing, "t4x2"),
	CASE(half_done_change_of_a_dead_process_is_repaired, "t4x2"),
	CASE(lock_of_a_dead_process_is_taken_over_and_its_damage_repaired, "t4x2"),
	CASE(bytes_survive_the_trip, "t4x2"),
	CASE(rectangles_and_boxes, "t4x2"),
	CASE(arrays_hold_texels_and_cost_memory, "t4x2"),
	CASE(texture_reference_keeps_its_settings, "t4x2"),
	CASE(pointer_attributes_are_reported, "t4x2"),
	CASE(registered_host_memory_is_known, "t4x2"),
	CASE(managed_memory_is_charged_where_it_is, "t4x2"),
	CASE(batch_copies_each_or_names_the_first_that_fails, "t4x2"),
	CASE(pool_keeps_up_to_its_threshold, "t4x2"),
	CASE(pool_reuses_memory_across_streams_in_order, "t4x2"),
	CASE(own_pool_is_charged_and_ends_with_its_last_allocation, "t4x2"),
	CASE(memory_kept_by_pools_makes_no_request_fail, "t4x2"),
	CASE(blocks_of_any_size_fill_the_card, "t4x2"),
	CASE(mixed_blocks_neither_overlap_nor_waste_pages, "t4x2"),
	CASE(freed_pieces_go_back_above_the_threshold_and_no_more, "t4x2"),
	CASE(physical_memory_lives_until_its_last_handle_and_mapping, "t4x2"),
	CASE(handles_for_the_fabric_need_a_channel, "h200x8"),
	CASE(mappings_show_the_same_bytes, "t4x2"),
	CASE(exported_memory_outlives_its_exporter, "t4x2"),
	CASE(ipc_handle_opens_in_another_process, "t4x2"),
	CASE(graph_memory_is_charged_at_launch_and_trimmed, "t4x2"),
	CASE(graph_allocation_outside_the_card_is_refused_at_launch, "t4x2"),
	CASE(unfreed_graph_allocation_must_be_freed_before_the_next_launch, "t4x2"),
	CASE(calls_without_suffix_are_charged_too, "t4x2"),
	CASE(mig_instance_is_the_device, "a100x8-mig"),
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, COUNT(cases));
}
