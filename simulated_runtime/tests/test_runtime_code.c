/* SPDX-License-Identifier: Apache-2.0 */
/* Registered code, launches in every form, attributes of kernels, libraries. */
#include "simulated_runtime/tests/client.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#define MANY 5000

static void test_registration_needs_no_driver_and_ends(void)
{
	CUkernel kernel;
	void **handle = client_register();
	CHECK(__cudaInitModule(handle));
	OK(__cudaGetKernel(&kernel, spin_stub));
	OK(cudaLaunchKernel(second_stub, ONE, ONE, (void *[]){ &(uint64_t){ 0 } }, 0, NULL));
	__cudaUnregisterFatBinary(handle);
	FAILS(__cudaGetKernel(&kernel, spin_stub), cudaErrorInvalidDeviceFunction);
	FAILS(cudaLaunchKernel(kernel, ONE, ONE, (void *[]){ &(uint64_t){ 0 } }, 0, NULL), cudaErrorInvalidDeviceFunction);
}

static void test_many_kernels_are_found_by_address(void)
{
	static char stubs[MANY * 16];
	struct fatbin_wrapper *wrappers = calloc(MANY, sizeof(*wrappers));
	void **handles[MANY];
	CUkernel first, kernel;
	for (int i = 0; i < MANY; i++) {
		wrappers[i] = (struct fatbin_wrapper){ .magic = FATBIN_WRAPPER_MAGIC, .version = 1, .data = IMAGE };
		handles[i] = __cudaRegisterFatBinary(&wrappers[i]);
		client_register_kernel(handles[i], &stubs[i * 16], i % 2 ? "second" : "aliquot_spin");
	}
	OK(__cudaGetKernel(&first, &stubs[0]));
	for (int i = 1; i < MANY; i += 501) {
		OK(__cudaGetKernel(&kernel, &stubs[i * 16]));
		CHECK(kernel != first);
	}
	for (int i = 0; i < MANY; i += 2)
		__cudaUnregisterFatBinary(handles[i]);
	FAILS(__cudaGetKernel(&kernel, &stubs[0]), cudaErrorInvalidDeviceFunction);
	OK(__cudaGetKernel(&kernel, &stubs[16 * 3]));
	for (int i = 1; i < MANY; i += 2)
		__cudaUnregisterFatBinary(handles[i]);
	free(wrappers);
}

static void test_bad_binaries_and_names_are_refused(void)
{
	struct fatbin_wrapper bad = { .magic = 1, .version = 1, .data = IMAGE };
	CUkernel kernel;
	void **handle = __cudaRegisterFatBinary(&bad);
	client_register_kernel(handle, spin_stub, "aliquot_spin");
	FAILS(__cudaGetKernel(&kernel, spin_stub), cudaErrorInvalidKernelImage);
	bad.magic = FATBIN_WRAPPER_MAGIC;
	OK(__cudaGetKernel(&kernel, spin_stub));
	client_register_kernel(handle, second_stub, "no_such_kernel");
	FAILS(__cudaGetKernel(&kernel, second_stub), cudaErrorInvalidDeviceFunction);
	FAILS(__cudaGetKernel(NULL, spin_stub), cudaErrorInvalidValue);
	FAILS(__cudaGetKernel(&kernel, NULL), cudaErrorInvalidDeviceFunction);
}

static void *get_kernel(void *out)
{
	OK(__cudaGetKernel(out, spin_stub));
	return NULL;
}

static void test_threads_load_a_binary_once(void)
{
	pthread_t threads[8];
	CUkernel kernels[8];
	client_register();
	for (int i = 0; i < 8; i++)
		CHECK_EQUAL(pthread_create(&threads[i], NULL, get_kernel, &kernels[i]), 0);
	for (int i = 0; i < 8; i++)
		CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
	for (int i = 1; i < 8; i++)
		CHECK(kernels[i] == kernels[0]);
}

/* ---- launches -------------------------------------------------------------------------------------------------------- */

/* Also the microseconds that passed meanwhile: on a busy machine the launch comes long after the record. */
static double microseconds_of(cudaError_t (*launch)(void), double *passed)
{
	double began = test_seconds();
	cudaEvent_t start, end;
	float milliseconds;
	OK(cudaEventCreate(&start));
	OK(cudaEventCreate(&end));
	OK(cudaEventRecord(start, NULL));
	OK(launch());
	OK(cudaEventRecord(end, NULL));
	OK(cudaEventSynchronize(end));
	*passed = (test_seconds() - began) * 1e6;
	OK(cudaEventElapsedTime(&milliseconds, start, end));
	OK(cudaEventDestroy(start));
	OK(cudaEventDestroy(end));
	return (double)milliseconds * 1000;
}

static uint64_t two_ms = 2000;
static void *spin_arguments[] = { &two_ms };

static cudaError_t by_stub(void)
{
	return cudaLaunchKernel(spin_stub, ONE, ONE, spin_arguments, 0, NULL);
}

static cudaError_t by_handle(void)
{
	CUkernel kernel;
	OK(__cudaGetKernel(&kernel, spin_stub));
	return __cudaLaunchKernel(kernel, ONE, ONE, spin_arguments, 0, NULL);
}

static cudaError_t by_handle_as_function(void)
{
	CUkernel kernel;
	OK(__cudaGetKernel(&kernel, spin_stub));
	return cudaLaunchKernel(kernel, ONE, ONE, spin_arguments, 0, NULL);
}

static cudaError_t cooperatively(void)
{
	return cudaLaunchCooperativeKernel(spin_stub, ONE, ONE, spin_arguments, 0, NULL);
}

static cudaError_t by_configuration(void)
{
	cudaLaunchConfig_t config = { .gridDim = ONE, .blockDim = ONE };
	return cudaLaunchKernelExC(&config, spin_stub, spin_arguments);
}

static cudaError_t by_configuration_with_attribute(void)
{
	CUlaunchAttribute attribute = { .id = CU_LAUNCH_ATTRIBUTE_PRIORITY };
	cudaLaunchConfig_t config = { .gridDim = ONE, .blockDim = ONE, .attrs = &attribute, .numAttrs = 1 };
	return cudaLaunchKernelExC(&config, spin_stub, spin_arguments);
}

static void test_every_form_of_launch_runs_the_kernel(void)
{
	cudaError_t (*forms[])(void) = { by_stub,       by_handle,        by_handle_as_function,
					 cooperatively, by_configuration, by_configuration_with_attribute };
	client_register();
	OK(cudaFree(NULL));
	for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++) {
		double passed, took = microseconds_of(forms[i], &passed);
		CHECK_BETWEEN(took, 1900, passed + 500);
	}
}

static void test_launch_errors_are_the_last_error_of_the_thread(void)
{
	cudaLaunchConfig_t config = { .gridDim = { 1, 1, 1 }, .blockDim = { 4096, 1, 1 } };
	dim3 big = { 4096, 1, 1 };
	client_register();
	FAILS(cudaLaunchKernel(spin_stub, ONE, big, spin_arguments, 0, NULL), cudaErrorInvalidConfiguration);
	FAILS(cudaLaunchCooperativeKernel(spin_stub, ONE, big, spin_arguments, 0, NULL), cudaErrorInvalidConfiguration);
	FAILS(cudaLaunchKernelExC(&config, spin_stub, spin_arguments), cudaErrorInvalidConfiguration);
	FAILS(cudaLaunchKernelExC(NULL, spin_stub, spin_arguments), cudaErrorInvalidConfiguration);
	FAILS(cudaLaunchKernel(unregistered_stub, ONE, ONE, spin_arguments, 0, NULL), cudaErrorInvalidDeviceFunction);
	FAILS(cudaLaunchKernel(numbers, ONE, ONE, spin_arguments, 0, NULL), cudaErrorInvalidDeviceFunction);
	FAILS(__cudaLaunchKernel(NULL, ONE, ONE, spin_arguments, 0, NULL), cudaErrorInvalidDeviceFunction);
}

static void test_pushed_configurations_nest(void)
{
	dim3 grid, block;
	size_t shared;
	cudaStream_t stream;
	int depth = 0;
	FAILS(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), cudaErrorMissingConfiguration);
	CHECK_EQUAL(__cudaPushCallConfiguration((dim3){ 1, 2, 3 }, (dim3){ 4, 5, 6 }, 7, CU_STREAM_LEGACY), 0);
	CHECK_EQUAL(__cudaPushCallConfiguration((dim3){ 9, 1, 1 }, ONE, 0, NULL), 0);
	OK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream));
	CHECK(grid.x == 9 && !stream);
	OK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream));
	CHECK(grid.x == 1 && grid.y == 2 && grid.z == 3 && block.x == 4 && block.z == 6 && shared == 7 && stream == CU_STREAM_LEGACY);
	while (__cudaPushCallConfiguration(ONE, ONE, 0, NULL) == 0 && depth < 1000)
		depth++;
	CHECK_BETWEEN(depth, 8, 999);
	CHECK_EQUAL(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

/* ---- kernels and variables ------------------------------------------------------------------------------------------- */

static void test_attributes_of_kernels(void)
{
	struct cudaFuncAttributes attributes;
	CUkernel kernel;
	int blocks = 0, same = 0;
	client_register();
	OK(cudaFuncGetAttributes(&attributes, spin_stub));
	CHECK_EQUAL(attributes.maxThreadsPerBlock, 1024);
	OK(cudaFuncSetAttribute(spin_stub, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 65536));
	OK(cudaFuncGetAttributes(&attributes, spin_stub));
	CHECK_EQUAL(attributes.maxDynamicSharedSizeBytes, 65536);
	OK(__cudaGetKernel(&kernel, spin_stub));
	OK(cudaKernelSetAttributeForDevice(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 49152, 0));
	OK(cudaFuncGetAttributes(&attributes, kernel));
	CHECK_EQUAL(attributes.maxDynamicSharedSizeBytes, 49152);
	OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, spin_stub, 256, 0));
	OK(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&same, spin_stub, 256, 0, 0));
	CHECK(blocks > 0 && blocks == same);
	FAILS(cudaFuncGetAttributes(&attributes, unregistered_stub), cudaErrorInvalidDeviceFunction);
	FAILS(cudaFuncGetAttributes(NULL, spin_stub), cudaErrorInvalidValue);
	FAILS(cudaFuncSetAttribute(spin_stub, CU_FUNC_ATTRIBUTE_NUM_REGS, 1), cudaErrorInvalidValue);
	FAILS(cudaKernelSetAttributeForDevice(kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1, 99), cudaErrorInvalidDevice);
	FAILS(cudaOccupancyMaxActiveBlocksPerMultiprocessor(NULL, spin_stub, 256, 0), cudaErrorInvalidValue);
}

static void test_variables_are_copied_to_and_found(void)
{
	char bytes[NUMBERS_BYTES] = "hello", back[NUMBERS_BYTES];
	void *address, *other;
	client_register();
	OK(cudaGetSymbolAddress(&address, numbers));
	OK(cudaMemcpyToSymbol(numbers, bytes, 100, 4, cudaMemcpyHostToDevice));
	OK(cudaMemcpy(back, (char *)address + 4, 100, cudaMemcpyDeviceToHost));
	CHECK_EQUAL(memcmp(back, bytes, 100), 0);
	OK(cudaMalloc(&other, NUMBERS_BYTES));
	OK(cudaMemset(other, 'x', NUMBERS_BYTES));
	OK(cudaMemcpyToSymbol_ptds(numbers, other, NUMBERS_BYTES, 0, cudaMemcpyDeviceToDevice));
	OK(cudaMemcpy(back, address, NUMBERS_BYTES, cudaMemcpyDefault));
	CHECK(back[0] == 'x' && back[NUMBERS_BYTES - 1] == 'x');
	FAILS(cudaMemcpyToSymbol(numbers, bytes, NUMBERS_BYTES, 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
	FAILS(cudaMemcpyToSymbol(numbers, bytes, 1, SIZE_MAX, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
	FAILS(cudaMemcpyToSymbol(numbers, bytes, 1, 0, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
	FAILS(cudaMemcpyToSymbol(spin_stub, bytes, 1, 0, cudaMemcpyHostToDevice), cudaErrorInvalidSymbol);
	FAILS(cudaGetSymbolAddress(&address, bytes), cudaErrorInvalidSymbol);
	FAILS(cudaGetSymbolAddress(NULL, numbers), cudaErrorInvalidValue);
}

/* ---- libraries ------------------------------------------------------------------------------------------------------- */

static void use_library(cudaLibrary_t library)
{
	cudaKernel_t kernel;
	unsigned int count = 0;
	void *address = NULL;
	size_t bytes = 0;
	OK(cudaLibraryGetKernelCount(&count, library));
	CHECK_EQUAL(count, 2);
	OK(cudaLibraryGetKernel(&kernel, library, "aliquot_spin"));
	OK(cudaLaunchKernel(kernel, ONE, ONE, (void *[]){ &(uint64_t){ 0 } }, 0, NULL));
	OK(cudaLibraryGetGlobal(&address, &bytes, library, "numbers"));
	CHECK(address && bytes == NUMBERS_BYTES);
	FAILS(cudaLibraryGetKernel(&kernel, library, "no_such_kernel"), cudaErrorSymbolNotFound);
	FAILS(cudaLibraryGetGlobal(&address, &bytes, library, "no_such_variable"), cudaErrorSymbolNotFound);
	CHECK(cudaLibraryGetManaged(&address, &bytes, library, "no_such_variable") != cudaSuccess);
	CHECK(cudaLibraryGetUnifiedFunction(&address, library, "no_such_function") != cudaSuccess);
	OK(cudaLibraryUnload(library));
	FAILS(cudaLaunchKernel(kernel, ONE, ONE, (void *[]){ &(uint64_t){ 0 } }, 0, NULL), cudaErrorInvalidDeviceFunction);
}

static void test_libraries_from_memory_and_files(void)
{
	cudaLibrary_t library;
	char path[4096];
	int file = test_file(path, sizeof path);
	CHECK(file >= 0 && write(file, IMAGE, strlen(IMAGE)) == (ssize_t)strlen(IMAGE));
	close(file);
	OK(cudaLibraryLoadData(&library, IMAGE, NULL, NULL, 0, NULL, NULL, 0));
	use_library(library);
	OK(cudaLibraryLoadFromFile(&library, path, NULL, NULL, 0, NULL, NULL, 0));
	use_library(library);
	unlink(path);
	FAILS(cudaLibraryLoadFromFile(&library, path, NULL, NULL, 0, NULL, NULL, 0), cudaErrorFileNotFound);
	CHECK(cudaLibraryLoadData(&library, NULL, NULL, NULL, 0, NULL, NULL, 0) != cudaSuccess);
}

static const struct test_case cases[] = {
	CASE(test_registration_needs_no_driver_and_ends, "h200x8"),
	CASE(test_many_kernels_are_found_by_address, "h200x8"),
	CASE(test_bad_binaries_and_names_are_refused, "h200x8"),
	CASE(test_threads_load_a_binary_once, "h200x8"),
	CASE(test_every_form_of_launch_runs_the_kernel, "h200x8"),
	CASE(test_launch_errors_are_the_last_error_of_the_thread, "h200x8"),
	CASE(test_pushed_configurations_nest, "h200x8"),
	CASE(test_attributes_of_kernels, "h200x8"),
	CASE(test_variables_are_copied_to_and_found, "h200x8"),
	CASE(test_libraries_from_memory_and_files, "h200x8"),
};

int main(int argc, char **argv)
{
	return client_main(argc, argv, cases, sizeof(cases) / sizeof(*cases));
}
