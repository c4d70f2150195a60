/* SPDX-License-Identifier: Apache-2.0 */
/* Versions, errors, devices, contexts, entry points. */
#include "simulated_runtime/tests/client.h"

#include <pthread.h>
#include <unistd.h>

static void test_versions_and_profiler(void)
{
	int runtime, driver;
	OK(cudaRuntimeGetVersion(&runtime));
	CHECK_EQUAL(runtime / 1000, RUNTIME_MAJOR);
	OK(cudaDriverGetVersion(&driver));
	CHECK_BETWEEN(driver, 13000, 13990);
	FAILS(cudaRuntimeGetVersion(NULL), cudaErrorInvalidValue);
	FAILS(cudaDriverGetVersion(NULL), cudaErrorInvalidValue);
	OK(cudaProfilerStart());
	OK(cudaProfilerStop());
}

static void test_errors_have_names_and_texts(void)
{
	CHECK_EQUAL(strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation"), 0);
	CHECK_EQUAL(strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"), 0);
	CHECK_EQUAL(strcmp(cudaGetErrorString(cudaErrorInitializationError), "initialization error"), 0);
	for (int number = -1; number < 1001; number++) {
		const char *name = cudaGetErrorName((cudaError_t)number), *text = cudaGetErrorString((cudaError_t)number);
		CHECK(name && text && *name && *text);
		CHECK_EQUAL(strncmp(name, "cuda", 4) == 0, strcmp(text, "unrecognized error code") != 0);
	}
}

/* ---- the current device ---------------------------------------------------------------------------------------------- */

static void test_counting_makes_no_context(void)
{
	int count, device;
	size_t before, after;
	OK(cudaGetDeviceCount(&count));
	CHECK(count >= 2);
	OK(cudaGetDevice(&device));
	CHECK_EQUAL(device, 0);
	CUcontext context;
	OK(cuCtxGetCurrent(&context));
	CHECK(!context);
	OK(cudaMemGetInfo(&before, &after));
	OK(cuCtxGetCurrent(&context));
	CHECK(context != NULL);
	FAILS(cudaGetDeviceCount(NULL), cudaErrorInvalidValue);
	FAILS(cudaGetDevice(NULL), cudaErrorInvalidValue);
}

static void *device_of_thread(void *out)
{
	OK(cudaGetDevice(out));
	return NULL;
}

static void test_current_device_belongs_to_the_thread(void)
{
	int here, there = -1;
	pthread_t thread;
	CUcontext context;
	OK(cudaSetDevice(1));
	OK(cuCtxGetCurrent(&context));
	CHECK(context != NULL);
	OK(cudaGetDevice(&here));
	CHECK_EQUAL(here, 1);
	CHECK_EQUAL(pthread_create(&thread, NULL, device_of_thread, &there), 0);
	CHECK_EQUAL(pthread_join(thread, NULL), 0);
	CHECK_EQUAL(there, 0);
	FAILS(cudaSetDevice(99), cudaErrorInvalidDevice);
	FAILS(cudaSetDevice(-1), cudaErrorInvalidDevice);
	FAILS(cudaSetDevice(1000), cudaErrorInvalidDevice);
	OK(cudaGetDevice(&here));
	CHECK_EQUAL(here, 1);
}

static void test_context_of_the_program_comes_first(void)
{
	CUcontext own, current;
	void *pointer;
	int device;
	OK(cuInit(0));
	OK(cuCtxCreate_v2(&own, 0, 1));
	OK(cudaGetDevice(&device));
	CHECK_EQUAL(device, 1);
	OK(cudaMalloc(&pointer, 1));
	OK(cuCtxGetCurrent(&current));
	CHECK(current == own);
}

static void call_in_forked_child(void *argument)
{
	void *pointer;
	(void)argument;
	FAILS(cudaMalloc(&pointer, 1), cudaErrorInitializationError);
}

static void test_forked_child_of_a_started_process_is_refused(void)
{
	OK(cudaFree(NULL));
	test_reap(test_spawn(call_in_forked_child, NULL), 0);
}

/* ---- what a device is ------------------------------------------------------------------------------------------------ */

static void read_properties(struct cudaDeviceProp *properties)
{
	memset(properties, 0x55, sizeof(*properties));
#if RUNTIME_MAJOR == 12
	OK(cudaGetDeviceProperties_v2(properties, 0));
	FAILS(cudaGetDeviceProperties_v2(NULL, 0), cudaErrorInvalidValue);
	FAILS(cudaGetDeviceProperties_v2(properties, 99), cudaErrorInvalidDevice);
	CHECK(properties->clockRate > 0 && properties->memoryClockRate > 0);
#else
	OK(cudaGetDeviceProperties(properties, 0));
	FAILS(cudaGetDeviceProperties(NULL, 0), cudaErrorInvalidValue);
	FAILS(cudaGetDeviceProperties(properties, 99), cudaErrorInvalidDevice);
	CHECK(properties->gpuPciDeviceID != 0);
#endif
}

static void test_properties_are_the_devices_own(void)
{
	struct cudaDeviceProp properties;
	char bus[32];
	int value;
	CUuuid uuid;
	size_t bytes;
	read_properties(&properties);
	CHECK(strstr(properties.name, "H200") != NULL);
	CHECK_EQUAL(properties.major, 9);
	CHECK_EQUAL(properties.warpSize, 32);
	OK(cuDeviceGetUuid_v2(&uuid, 0));
	CHECK_EQUAL(memcmp(&uuid, &properties.uuid, sizeof(uuid)), 0);
	OK(cuDeviceTotalMem_v2(&bytes, 0));
	CHECK_EQUAL(properties.totalGlobalMem, bytes);
	OK(cudaDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
	CHECK_EQUAL(properties.multiProcessorCount, value);
	OK(cudaDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0));
	CHECK_EQUAL(properties.sharedMemPerBlockOptin, value);
	for (size_t i = 0; i < sizeof(properties.reserved) / sizeof(*properties.reserved); i++)
		CHECK_EQUAL(properties.reserved[i], 0);
	OK(cudaDeviceGetPCIBusId(bus, sizeof(bus), 0));
	unsigned int domain, number;
	CHECK_EQUAL(sscanf(bus, "%x:%x:", &domain, &number), 2);
	CHECK_EQUAL(number, properties.pciBusID);
	FAILS(cudaDeviceGetPCIBusId(bus, sizeof(bus), 99), cudaErrorInvalidDevice);
	FAILS(cudaDeviceGetAttribute(&value, 0, 0), cudaErrorInvalidValue);
	FAILS(cudaDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 99), cudaErrorInvalidDevice);
}

static void test_graph_memory_and_priorities_of_a_device(void)
{
	uint64_t bytes = 1;
	int least, greatest;
	OK(cudaDeviceGetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &bytes));
	CHECK_EQUAL(bytes, 0);
	OK(cudaDeviceSetGraphMemAttribute(0, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &bytes));
	FAILS(cudaDeviceGetGraphMemAttribute(99, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &bytes), cudaErrorInvalidDevice);
	FAILS(cudaDeviceSetGraphMemAttribute(99, CU_GRAPH_MEM_ATTR_USED_MEM_HIGH, &bytes), cudaErrorInvalidDevice);
	OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
	CHECK(greatest < least);
}

static void test_peers_copy_and_the_current_context_stays(void)
{
	char text[16] = "peer", back[16];
	CUcontext before, after;
	void *here, *there;
	int can = 0;
	OK(cudaDeviceCanAccessPeer(&can, 0, 1));
	CHECK_EQUAL(can, 1);
	OK(cudaSetDevice(1));
	OK(cudaMalloc(&there, sizeof(text)));
	OK(cudaSetDevice(0));
	OK(cudaMalloc(&here, sizeof(text)));
	OK(cuCtxGetCurrent(&before));
	OK(cudaDeviceEnablePeerAccess(1, 0));
	FAILS(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
	OK(cudaMemcpy(here, text, sizeof(text), cudaMemcpyHostToDevice));
	OK(cudaMemcpyPeerAsync(there, 1, here, 0, sizeof(text), NULL));
	OK(cudaDeviceSynchronize());
	OK(cuCtxGetCurrent(&after));
	CHECK(before == after);
	OK(cudaMemcpy(back, there, sizeof(back), cudaMemcpyDefault));
	CHECK_EQUAL(strcmp(back, text), 0);
	FAILS(cudaMemcpyPeerAsync(there, 99, here, 0, 1, NULL), cudaErrorInvalidDevice);
	FAILS(cudaDeviceCanAccessPeer(&can, 0, 99), cudaErrorInvalidDevice);
}

/* ---- entry points of the driver -------------------------------------------------------------------------------------- */

static void test_entry_points_of_the_driver(void)
{
	CUresult (*init)(unsigned int) = NULL;
	void *function = numbers;
	int status = -1;
	OK(cudaGetDriverEntryPointByVersion("cuInit", (void **)&init, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
	CHECK_EQUAL(status, CU_GET_PROC_ADDRESS_SUCCESS);
	OK(init(0));
	OK(cudaGetDriverEntryPointByVersion("cuNoSuchCall", &function, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
	CHECK_EQUAL(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
	CHECK(!function);
	OK(cudaGetDriverEntryPointByVersion("cuNoSuchCall", &function, 12000, CU_GET_PROC_ADDRESS_DEFAULT, NULL));
	FAILS(cudaGetDriverEntryPointByVersion(NULL, &function, 12000, 0, &status), cudaErrorInvalidValue);
#if RUNTIME_MAJOR == 12
	OK(cudaGetDriverEntryPoint("cuInit", (void **)&init, CU_GET_PROC_ADDRESS_DEFAULT, &status));
	OK(init(0));
#endif
}

static const struct test_case cases[] = {
	CASE(test_versions_and_profiler, "h200x8"),
	CASE(test_errors_have_names_and_texts, "h200x8"),
	CASE(test_counting_makes_no_context, "h200x8"),
	CASE(test_current_device_belongs_to_the_thread, "h200x8"),
	CASE(test_context_of_the_program_comes_first, "h200x8"),
	CASE(test_forked_child_of_a_started_process_is_refused, "h200x8"),
	CASE(test_properties_are_the_devices_own, "h200x8"),
	CASE(test_graph_memory_and_priorities_of_a_device, "h200x8"),
	CASE(test_peers_copy_and_the_current_context_stays, "h200x8"),
	CASE(test_entry_points_of_the_driver, "h200x8"),
};

int main(int argc, char **argv)
{
	return client_main(argc, argv, cases, sizeof(cases) / sizeof(*cases));
}
