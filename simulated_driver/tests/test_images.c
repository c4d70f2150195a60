/* SPDX-License-Identifier: Apache-2.0 */
/* test_images.c - module images: the readers and the writer, then modules, libraries, links, clusters and tensor maps made of them. */
#define _GNU_SOURCE
#include <elf.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated_driver/image.h"
#include "simulated_driver/tests/harness.h"

#define HOPPER 90
#define TURING 75
#define CODE_BYTES (4 * MIB)
#define ZERO_BYTES (6 * MIB)

struct file {
	uint8_t *bytes;
	uint64_t length;
};

static char *copy(const char *text)
{
	char *copied = strdup(text);
	CHECK(copied != NULL);
	return copied;
}

static struct sim_image_variable *variable(struct sim_image *image, const char *name, uint64_t bytes, bool is_managed)
{
	uint32_t block = sim_image_add_block(image, is_managed);
	CHECK(block != UINT32_MAX);
	image->blocks[block].bytes = bytes;
	struct sim_image_variable *made = sim_image_add_variable(image, copy(name), bytes);
	CHECK(made != NULL);
	made->block = block;
	return made;
}

/* A cubin with two kernels, a variable with a value, one of zeros and a managed one. */
static struct file cubin(uint32_t capability)
{
	struct sim_image image = { .capability = capability, .code_bytes = CODE_BYTES };
	struct file file;
	struct sim_image_kernel *kernel = sim_image_add_kernel(&image, copy("first"));
	CHECK(kernel != NULL);
	kernel->registers = 40, kernel->shared_bytes = 512, kernel->local_bytes = 16, kernel->max_threads = 256;
	CHECK(sim_image_add_parameter(kernel, (struct sim_image_parameter){ 0, 0, 8 }));
	CHECK(sim_image_add_parameter(kernel, (struct sim_image_parameter){ 1, 8, 20000 }));
	kernel = sim_image_add_kernel(&image, copy("clustered"));
	CHECK(kernel != NULL);
	kernel->cluster[0] = 2, kernel->cluster[1] = kernel->cluster[2] = 1;
	struct sim_image_variable *value = variable(&image, "value", 4, false);
	struct sim_image_block *block = &image.blocks[value->block];
	block->initial = malloc(4);
	CHECK(block->initial != NULL);
	memcpy(block->initial, &(int){ 42 }, 4);
	block->initial_bytes = 4;
	variable(&image, "zeros", ZERO_BYTES, false);
	variable(&image, "shared", 64, true);
	OK(sim_image_write(&image, &file.bytes, &file.length));
	sim_image_free(&image);
	return file;
}

/* ---- readers ------------------------------------------------------------------------------------------------------------ */

static void a_written_image_reads_back(void)
{
	struct file file = cubin(HOPPER);
	struct sim_image image;
	OK(sim_image_read((struct sim_view){ file.bytes, file.length }, HOPPER, &image));
	CHECK_EQUAL(image.n_kernels, 2);
	CHECK_EQUAL(image.code_bytes, CODE_BYTES);
	const struct sim_image_kernel *first = sim_image_kernel(&image, "first");
	CHECK(first != NULL);
	CHECK_EQUAL(first->registers, 40);
	CHECK_EQUAL(first->shared_bytes, 512);
	CHECK_EQUAL(first->local_bytes, 16);
	CHECK_EQUAL(first->max_threads, 256);
	CHECK_EQUAL(first->n_parameters, 2);
	CHECK_EQUAL(first->parameters[1].offset, 8);
	CHECK_EQUAL(first->parameters[1].bytes, 20000);
	CHECK_EQUAL(sim_image_kernel(&image, "clustered")->cluster[0], 2);
	CHECK_EQUAL(image.n_variables, 3);
	sim_image_free(&image);
	for (uint64_t length = 0; length < 4096; length += 7) { /* cut short */
		CHECK(sim_image_read((struct sim_view){ file.bytes, length }, HOPPER, &image) != CUDA_SUCCESS);
		sim_image_free(&image);
	}
	free(file.bytes);
}

/* Each capability with each: a cubin runs on its own major version, on its own minor version and newer. */
static void a_cubin_runs_on_its_own_major_version(void)
{
	static const uint32_t known[] = { 70, 75, 80, 86, 89, 90, 100, 103, 120 };
	for (unsigned built = 0; built < sizeof known / sizeof *known; built++) {
		struct file file = cubin(known[built]);
		for (unsigned on = 0; on < sizeof known / sizeof *known; on++) {
			struct sim_image image;
			bool runs = known[built] / 10 == known[on] / 10 && known[built] <= known[on];
			CHECK_EQUAL(sim_image_read((struct sim_view){ file.bytes, file.length }, known[on], &image),
				    runs ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU);
			sim_image_free(&image);
		}
		free(file.bytes);
	}
}

static void lz4_repeats_and_refuses(void)
{
	static const uint8_t packed[] = { 0x1f, 'a', 1, 0, 10, 0x20, 'b', 'c' };  /* one letter, 29 repeats of it, two letters */
	uint8_t out[64];
	uint64_t length;
	CHECK(sim_unpack_lz4((struct sim_view){ packed, sizeof packed }, out, sizeof out, &length));
	CHECK_EQUAL(length, 32);
	for (unsigned i = 0; i < 30; i++)
		CHECK_EQUAL(out[i], 'a');
	CHECK_EQUAL(out[31], 'c');
	CHECK(!sim_unpack_lz4((struct sim_view){ packed, sizeof packed }, out, 31, &length));
	for (unsigned cut = 1; cut < 5; cut++)
		CHECK(!sim_unpack_lz4((struct sim_view){ packed, cut }, out, sizeof out, &length) || cut == 2);
	static const uint8_t too_far[] = { 0x10, 'a', 2, 0 };
	CHECK(!sim_unpack_lz4((struct sim_view){ too_far, sizeof too_far }, out, sizeof out, &length));
}

/* The header of this image claims more bytes than are mapped. */
static void images_past_the_end_of_memory_are_invalid(void)
{
	struct file file = cubin(HOPPER);
	long page = sysconf(_SC_PAGESIZE);
	uint8_t *memory = mmap(NULL, (size_t)page * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct sim_view view;
	CHECK(memory != MAP_FAILED);
	OK(mprotect(memory + page, (size_t)page, PROT_NONE));
	memcpy(memory, file.bytes, sizeof(Elf64_Ehdr));
	((Elf64_Ehdr *)(void *)memory)->e_shoff = (uint64_t)page - 16; /* its table of sections goes on where nothing can be read */
	CHECK_EQUAL(sim_image_locate(memory, &view), CUDA_ERROR_INVALID_IMAGE);
	uint32_t fatbin[4] = { SIM_FATBIN_MAGIC, 16 << 16 | 1, 2 * (uint32_t)page, 0 };
	memcpy(memory, fatbin, sizeof fatbin);
	CHECK_EQUAL(sim_image_locate(memory, &view), CUDA_ERROR_INVALID_IMAGE);
	OK(munmap(memory, (size_t)page * 2));
	free(file.bytes);
}

/* ---- modules and libraries ---------------------------------------------------------------------------------------------- */

static uint64_t taken_since(uint64_t free_bytes)
{
	return free_bytes - test_free_bytes();
}

static void modules_take_code_and_variables(void)
{
	struct file file = cubin(HOPPER);
	CUmodule module;
	CUdeviceptr address;
	CUfunction function;
	size_t bytes;
	int value = 0;
	test_context(0);
	uint64_t before = test_free_bytes();
	OK(cuModuleLoadData(&module, file.bytes));
	memset(file.bytes, 0xff, file.length); /* the module does not need it any more */
	CHECK_EQUAL(taken_since(before), CODE_BYTES + ZERO_BYTES + 2 * MIB); /* a segment of small memory holds the variable with a value */
	OK(cuModuleGetGlobal_v2(&address, &bytes, module, "value"));
	OK(cuMemcpyDtoH_v2(&value, address, bytes));
	CHECK_EQUAL(value, 42);
	OK(cuModuleGetGlobal_v2(&address, &bytes, module, "zeros"));
	CHECK_EQUAL(bytes, ZERO_BYTES);
	OK(cuMemcpyDtoH_v2(&value, address + bytes - sizeof value, sizeof value));
	CHECK_EQUAL(value, 0);
	OK(cuModuleGetFunction(&function, module, "first"));
	OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function));
	CHECK_EQUAL(value, 256);
	CHECK_EQUAL(cuModuleGetFunction(&function, module, "third"), CUDA_ERROR_NOT_FOUND);
	OK(cuModuleUnload(module));
	CHECK_EQUAL(taken_since(before), 0);
	free(file.bytes);
}

static void variables_are_zero_where_memory_was_used(void)
{
	static const char text[] = ".global .b8 small[64];\n.entry k()\n";
	CUdeviceptr dirty, address;
	CUmodule module;
	size_t bytes;
	uint64_t value = 1;
	test_context(0);
	for (int i = 0; i < 2; i++) {
		OK(cuMemAlloc_v2(&dirty, 64));
		OK(cuMemsetD8_v2(dirty, 0xff, 64));
		OK(cuMemFree_v2(dirty));
		OK(cuModuleLoadData(&module, text));
		OK(cuModuleGetGlobal_v2(&address, &bytes, module, "small"));
		OK(cuMemcpyDtoH_v2(&value, address, sizeof value));
		CHECK_EQUAL(value, 0);
		OK(cuMemsetD8_v2(address, 0xff, bytes));
		OK(cuModuleUnload(module));
	}
}

/* The first use of a library in a context, in each way. */
enum first_use { USE_FUNCTION, USE_MODULE, USE_VARIABLE, USE_MANAGED, USE_LOAD, USE_LAUNCH, N_FIRST_USES };

static void use(enum first_use way, CUlibrary library, CUkernel kernel)
{
	CUfunction function;
	CUmodule module;
	CUdeviceptr address;
	size_t bytes;
	switch (way) {
	case USE_FUNCTION: OK(cuKernelGetFunction(&function, kernel)); break;
	case USE_MODULE: OK(cuLibraryGetModule(&module, library)); break;
	case USE_VARIABLE: OK(cuLibraryGetGlobal(&address, &bytes, library, "value")); break;
	case USE_MANAGED: OK(cuLibraryGetManaged(&address, &bytes, library, "shared")); break;
	case USE_LOAD: OK(cuFuncLoad((CUfunction)(void *)kernel)); break;
	default: OK(cuLaunchKernel((CUfunction)(void *)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	}
}

static void libraries_take_memory_at_first_use_in_a_context(void)
{
	const uint64_t whole = CODE_BYTES + ZERO_BYTES + 2 * MIB;
	CUlibraryOption option = CU_LIBRARY_BINARY_IS_PRESERVED;
	CUfunctionLoadingState state;
	CUlibrary library;
	CUkernel kernel;
	CUcontext first = test_context(0), second = test_context(0);
	struct file file = cubin(HOPPER);
	for (enum first_use way = 0; way < N_FIRST_USES; way++) {
		uint64_t before = test_free_bytes();
		OK(cuLibraryLoadData(&library, file.bytes, NULL, NULL, 0, &option, NULL, 1));
		OK(cuLibraryGetKernel(&kernel, library, "first"));
		CHECK_EQUAL(taken_since(before), 0);
		OK(cuFuncIsLoaded(&state, (CUfunction)(void *)kernel));
		CHECK_EQUAL(state, CU_FUNCTION_LOADING_STATE_UNLOADED);
		use(way, library, kernel);
		CHECK_EQUAL(taken_since(before), whole);
		use(way, library, kernel);
		CHECK_EQUAL(taken_since(before), whole);
		OK(cuFuncIsLoaded(&state, (CUfunction)(void *)kernel));
		CHECK_EQUAL(state, CU_FUNCTION_LOADING_STATE_LOADED);
		OK(cuCtxSetCurrent(first));
		use(way, library, kernel);
		CHECK_BETWEEN(taken_since(before), 2 * whole - 2 * MIB, 2 * whole); /* both contexts share a segment of small memory */
		OK(cuCtxSetCurrent(second));
		OK(cuCtxSynchronize());
		OK(cuLibraryUnload(library));
		CHECK_EQUAL(taken_since(before), 0);
	}
	free(file.bytes);
}

static void the_end_of_a_context_frees_its_part_of_a_library(void)
{
	CUdeviceptr address, again;
	CUlibrary library;
	CUcontext kept = test_context(0);
	struct file file = cubin(HOPPER);
	OK(cuLibraryLoadData(&library, file.bytes, NULL, NULL, 0, NULL, NULL, 0));
	uint64_t before = test_free_bytes();
	for (int i = 0; i < 3; i++) {
		CUcontext ended = test_context(0);
		OK(cuLibraryGetGlobal(&address, NULL, library, "zeros"));
		OK(cuCtxDestroy_v2(ended));
		OK(cuCtxSetCurrent(kept));
		CHECK_EQUAL(taken_since(before), 0);
	}
	OK(cuLibraryGetGlobal(&address, NULL, library, "zeros"));
	OK(cuLibraryGetGlobal(&again, NULL, library, "zeros"));
	CHECK_EQUAL(address, again);
	free(file.bytes);
}

static void a_library_that_does_not_fit_is_refused_at_first_use(void)
{
	CUdeviceptr filling, address;
	CUfunction function;
	CUlibrary library;
	CUkernel kernel;
	test_context(0);
	struct file file = cubin(TURING);
	OK(cuLibraryLoadData(&library, file.bytes, NULL, NULL, 0, NULL, NULL, 0));
	OK(cuLibraryGetKernel(&kernel, library, "first"));
	OK(cuMemAlloc_v2(&filling, test_free_bytes() - CODE_BYTES));
	uint64_t room = test_free_bytes();
	CHECK_EQUAL(cuKernelGetFunction(&function, kernel), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQUAL(cuLibraryGetGlobal(&address, NULL, library, "value"), CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQUAL(test_free_bytes(), room); /* nothing of it stays */
	OK(cuMemFree_v2(filling));
	OK(cuKernelGetFunction(&function, kernel));
	free(file.bytes);
}

/* ---- threads ------------------------------------------------------------------------------------------------------------ */

#define N_THREADS 8

struct user {
	pthread_t thread;
	CUcontext context;
	CUlibrary library;
	pthread_barrier_t *start;
	CUdeviceptr address;
};

static void *use_at_once(void *argument)
{
	struct user *user = argument;
	CUkernel kernel;
	OK(cuCtxSetCurrent(user->context));
	OK(cuLibraryGetKernel(&kernel, user->library, "first"));
	pthread_barrier_wait(user->start);
	OK(cuLaunchKernel((CUfunction)(void *)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	OK(cuLibraryGetGlobal(&user->address, NULL, user->library, "zeros"));
	return NULL;
}

static void threads_share_one_load_per_context(void)
{
	struct user users[N_THREADS];
	pthread_barrier_t start;
	CUlibrary library;
	CUcontext contexts[2] = { test_context(0), test_context(0) };
	struct file file = cubin(HOPPER);
	OK(pthread_barrier_init(&start, NULL, N_THREADS));
	for (int round = 0; round < 20; round++) {
		uint64_t before = test_free_bytes();
		OK(cuLibraryLoadData(&library, file.bytes, NULL, NULL, 0, NULL, NULL, 0));
		for (int i = 0; i < N_THREADS; i++) {
			users[i] = (struct user){ .context = contexts[i % 2], .library = library, .start = &start };
			OK(pthread_create(&users[i].thread, NULL, use_at_once, &users[i]));
		}
		for (int i = 0; i < N_THREADS; i++)
			OK(pthread_join(users[i].thread, NULL));
		for (int i = 2; i < N_THREADS; i++)
			CHECK(users[i].address == users[i % 2].address);
		CHECK(users[0].address != users[1].address);
		CHECK_EQUAL(taken_since(before), 2 * (CODE_BYTES + ZERO_BYTES) + 2 * MIB);
		OK(cuCtxSynchronize());
		OK(cuLibraryUnload(library));
		CHECK_EQUAL(taken_since(before), 0);
	}
	free(file.bytes);
}

/* ---- links -------------------------------------------------------------------------------------------------------------- */

static void a_link_makes_an_image_of_all_inputs(void)
{
	char ptx[] = ".version 8.0\n.entry from_ptx(.param .u32 a, .param .u64 b)\n{}\n.global .u64 counter;\n";
	struct file file = cubin(HOPPER);
	CUlinkState state;
	CUmodule module;
	CUfunction function;
	CUdeviceptr address;
	size_t offset, bytes;
	void *linked;
	int value = 0;
	test_context(0);
	OK(cuLinkCreate_v2(0, NULL, NULL, &state));
	OK(cuLinkAddData_v2(state, CU_JIT_INPUT_PTX, ptx, sizeof ptx, "ptx", 0, NULL, NULL));
	OK(cuLinkAddData_v2(state, CU_JIT_INPUT_CUBIN, file.bytes, file.length, "cubin", 0, NULL, NULL));
	CHECK_EQUAL(cuLinkAddData_v2(state, CU_JIT_INPUT_CUBIN, ptx, 3, "cut", 0, NULL, NULL), CUDA_ERROR_INVALID_PTX);
	OK(cuLinkComplete(state, &linked, &bytes));
	CHECK(bytes > CODE_BYTES);
	OK(cuModuleLoadData(&module, linked));
	OK(cuLinkDestroy(state));
	CHECK_EQUAL(cuLinkDestroy(state), CUDA_ERROR_INVALID_HANDLE);
	OK(cuModuleGetFunction(&function, module, "first"));
	OK(cuModuleGetFunction(&function, module, "from_ptx"));
	OK(cuFuncGetParamInfo(function, 1, &offset, &bytes));
	CHECK_EQUAL(offset, 8);
	CHECK_EQUAL(bytes, 8);
	CHECK_EQUAL(cuFuncGetParamInfo(function, 2, &offset, &bytes), CUDA_ERROR_INVALID_VALUE);
	OK(cuModuleGetGlobal_v2(&address, &bytes, module, "counter"));
	OK(cuModuleGetGlobal_v2(&address, &bytes, module, "value"));
	OK(cuMemcpyDtoH_v2(&value, address, sizeof value));
	CHECK_EQUAL(value, 42);
	free(file.bytes);
}

/* What host compilers make: something, a fat binary for `capability` at an odd address, something. */
static struct file object(uint32_t capability)
{
	const uint64_t before = 333, after = 100, header = 16, entry = 64;
	struct file image = cubin(capability), made = { NULL, before + header + entry + image.length + after };
	uint32_t head[] = { SIM_FATBIN_MAGIC, (uint32_t)header << 16 | 1, (uint32_t)(entry + image.length), 0 };
	uint32_t words[16] = { 0x1010002, (uint32_t)entry, (uint32_t)image.length, 0, 0, 0, 8, capability };
	made.bytes = calloc(1, made.length);
	CHECK(made.bytes != NULL);
	memcpy(made.bytes + 8, head, sizeof(uint32_t)); /* the magic number alone */
	memcpy(made.bytes + before, head, sizeof head);
	memcpy(made.bytes + before + header, words, sizeof words);
	memcpy(made.bytes + before + header + entry, image.bytes, image.length);
	free(image.bytes);
	return made;
}

static void a_link_takes_the_fat_binaries_in_objects(void)
{
	struct file fitting = object(HOPPER), other = object(TURING);
	CUlinkState state;
	CUmodule module;
	unsigned count;
	void *linked;
	test_context(0);
	OK(cuLinkCreate_v2(0, NULL, NULL, &state));
	OK(cuLinkAddData_v2(state, CU_JIT_INPUT_LIBRARY, other.bytes, other.length, "other", 0, NULL, NULL));
	OK(cuLinkAddData_v2(state, CU_JIT_INPUT_OBJECT, fitting.bytes, fitting.length, "object", 0, NULL, NULL));
	OK(cuLinkAddData_v2(state, CU_JIT_INPUT_OBJECT, fitting.bytes, fitting.length, "the same", 0, NULL, NULL));
	CHECK_EQUAL(cuLinkAddData_v2(state, CU_JIT_INPUT_NVVM, fitting.bytes, fitting.length, "", 0, NULL, NULL), CUDA_ERROR_NOT_SUPPORTED);
	CHECK_EQUAL(cuLinkAddFile_v2(state, CU_JIT_INPUT_OBJECT, "/nonexistent", 0, NULL, NULL), CUDA_ERROR_FILE_NOT_FOUND);
	OK(cuLinkComplete(state, &linked, NULL));
	CHECK_EQUAL(cuLinkAddData_v2(state, CU_JIT_INPUT_OBJECT, fitting.bytes, fitting.length, "", 0, NULL, NULL),
		    CUDA_ERROR_INVALID_VALUE);
	OK(cuModuleLoadData(&module, linked));
	OK(cuModuleGetFunctionCount(&count, module));
	CHECK_EQUAL(count, 2);
	OK(cuLinkDestroy(state));
	free(fitting.bytes);
	free(other.bytes);
}

/* ---- clusters and tensor maps --------------------------------------------------------------------------------------------- */

static CUresult clusters(CUfunction function, unsigned size, int *count)
{
	CUlaunchAttribute cluster = { .id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = { size, 1, 1 } };
	CUlaunchConfig config = { .gridDimX = 64,
				  .gridDimY = 1,
				  .gridDimZ = 1,
				  .blockDimX = 256,
				  .blockDimY = 1,
				  .blockDimZ = 1,
				  .attrs = &cluster,
				  .numAttrs = size ? 1 : 0 };
	CUresult result = cuOccupancyMaxActiveClusters(count, function, &config);
	CHECK_EQUAL(cuLaunchKernelEx(&config, function, NULL, NULL), size || result == CUDA_SUCCESS ? result : CUDA_SUCCESS);
	return result;
}

static void clusters_have_portable_and_required_sizes(void)
{
	struct file file = cubin(HOPPER);
	CUlaunchConfig config = { .gridDimX = 64, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 256, .blockDimY = 1, .blockDimZ = 1 };
	CUmodule module;
	CUfunction plain, fixed;
	int value;
	test_context(0);
	OK(cuModuleLoadData(&module, file.bytes));
	OK(cuModuleGetFunction(&plain, module, "first"));
	OK(cuModuleGetFunction(&fixed, module, "clustered"));
	CHECK_EQUAL(clusters(plain, 0, &value), CUDA_ERROR_INVALID_CLUSTER_SIZE);
	OK(clusters(plain, 4, &value));
	CHECK_EQUAL(value, 132 * 6 / 4);
	CHECK_EQUAL(clusters(plain, 16, &value), CUDA_ERROR_INVALID_CLUSTER_SIZE);
	CHECK_EQUAL(clusters(plain, 3, &value), CUDA_ERROR_INVALID_CLUSTER_SIZE); /* 64 blocks are no multiple */
	OK(cuOccupancyMaxPotentialClusterSize(&value, plain, &config));
	CHECK_EQUAL(value, 8);
	OK(cuFuncSetAttribute(plain, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
	OK(cuOccupancyMaxPotentialClusterSize(&value, plain, &config));
	CHECK_EQUAL(value, 16);
	OK(clusters(plain, 16, &value));
	OK(clusters(fixed, 0, &value));
	CHECK_EQUAL(value, 132 * 8 / 2);
	CHECK_EQUAL(clusters(fixed, 4, &value), CUDA_ERROR_INVALID_CLUSTER_SIZE);
	CHECK_EQUAL(cuFuncSetAttribute(fixed, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, 4), CUDA_ERROR_NOT_PERMITTED);
	OK(cuFuncSetAttribute(plain, CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, 2));
	free(file.bytes);
}

/* Each resource of an SM in turn is what few blocks fit in. */
static void occupancy_counts_registers_and_shared_memory(void)
{
	struct sim_image image = { .capability = HOPPER };
	struct file file;
	CUmodule module;
	CUfunction function;
	int blocks;
	for (unsigned i = 0; i < 3; i++) {
		static const char *const names[] = { "small", "registers", "shared" };
		struct sim_image_kernel *kernel = sim_image_add_kernel(&image, copy(names[i]));
		CHECK(kernel != NULL);
		kernel->registers = i == 1 ? 128 : 16;
		kernel->shared_bytes = i == 2 ? 40 * 1024 : 0;
		kernel->max_threads = 512;
	}
	OK(sim_image_write(&image, &file.bytes, &file.length));
	sim_image_free(&image);
	test_context(0);
	OK(cuModuleLoadData(&module, file.bytes));
	free(file.bytes);
	OK(cuModuleGetFunction(&function, module, "small"));
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 256, 0));
	CHECK_EQUAL(blocks, 8);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 256, 100 * 1024));
	CHECK_EQUAL(blocks, 2);
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 1024, 0));
	CHECK_EQUAL(blocks, 0); /* more threads than it was compiled for */
	OK(cuModuleGetFunction(&function, module, "registers"));
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 256, 0));
	CHECK_EQUAL(blocks, 2);
	OK(cuModuleGetFunction(&function, module, "shared"));
	OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 256, 0));
	CHECK_EQUAL(blocks, 5);
	OK(cuFuncGetAttribute(&blocks, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function));
	CHECK_EQUAL(blocks, 8 * 1024);
}

static void clusters_need_hopper(void)
{
	CUmodule module;
	CUfunction function;
	int value;
	test_context(0);
	OK(cuModuleLoadData(&module, ".entry k()\n"));
	OK(cuModuleGetFunction(&function, module, "k"));
	CHECK_EQUAL(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, 2), CUDA_ERROR_NOT_SUPPORTED);
	OK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
	CHECK_EQUAL(clusters(function, 2, &value), CUDA_ERROR_INVALID_CLUSTER_SIZE);
}

/* A valid tiled map of 2 dimensions, with one argument changed. */
struct tile {
	CUtensorMapDataType type;
	cuuint32_t rank;
	uintptr_t address;
	cuuint64_t length, stride;
	cuuint32_t box, step;
	CUtensorMapSwizzle swizzle;
	CUtensorMapFloatOOBfill fill;
};

static CUresult encode(const struct tile *t)
{
	static CUtensorMap map;
	cuuint64_t lengths[5] = { t->length, 64, 1, 1, 1 }, strides[4] = { t->stride, 4096, 4096, 4096 };
	cuuint32_t box[5] = { t->box, 8, 1, 1, 1 }, steps[5] = { 1, t->step, 1, 1, 1 };
	return cuTensorMapEncodeTiled(&map, t->type, t->rank, (void *)t->address, lengths, strides, box, steps,
				      CU_TENSOR_MAP_INTERLEAVE_NONE, t->swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, t->fill);
}

static void tensor_maps_check_their_arguments(void)
{
	const struct tile good = { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, 1 << 20, 64, 128, 64, 1, CU_TENSOR_MAP_SWIZZLE_128B, 0 };
	const CUtensorMapFloatOOBfill nan = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
	struct tile bad[] = { good, good, good, good, good, good, good, good, good, good };
	CUtensorMap map;
	bad[0].rank = 0, bad[1].rank = 6, bad[2].address += 8, bad[3].length = 0, bad[4].stride = 8, bad[5].box = 257, bad[6].step = 9;
	bad[7].swizzle = CU_TENSOR_MAP_SWIZZLE_64B; /* the box is 128 bytes wide */
	bad[8].type = 99, bad[9].type = CU_TENSOR_MAP_DATA_TYPE_UINT16, bad[9].fill = nan;
	test_context(0);
	OK(encode(&good));
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++)
		CHECK_EQUAL(encode(&bad[i]), CUDA_ERROR_INVALID_VALUE);
	CHECK_EQUAL(cuTensorMapReplaceAddress(&map, (void *)(uintptr_t)24), CUDA_ERROR_INVALID_VALUE);
	OK(cuTensorMapReplaceAddress(&map, (void *)(uintptr_t)4096));
}

int main(int argc, char **argv)
{
	static const struct test_case cases[] = {
		CASE(a_written_image_reads_back, "t4x2"),
		CASE(a_cubin_runs_on_its_own_major_version, "t4x2"),
		CASE(lz4_repeats_and_refuses, "t4x2"),
		CASE(images_past_the_end_of_memory_are_invalid, "t4x2"),
		CASE(modules_take_code_and_variables, "h200x8"),
		CASE(variables_are_zero_where_memory_was_used, "t4x2"),
		CASE(libraries_take_memory_at_first_use_in_a_context, "h200x8"),
		CASE(the_end_of_a_context_frees_its_part_of_a_library, "h200x8"),
		CASE(a_library_that_does_not_fit_is_refused_at_first_use, "t4x2"),
		CASE(threads_share_one_load_per_context, "h200x8"),
		CASE(a_link_makes_an_image_of_all_inputs, "h200x8"),
		CASE(a_link_takes_the_fat_binaries_in_objects, "h200x8"),
		CASE(clusters_have_portable_and_required_sizes, "h200x8"),
		CASE(occupancy_counts_registers_and_shared_memory, "h200x8"),
		CASE(clusters_need_hopper, "t4x2"),
		CASE(tensor_maps_check_their_arguments, "h200x8"),
	};
	return test_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
