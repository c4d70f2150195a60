/* SPDX-License-Identifier: Apache-2.0 */
/* device.c - what a device is. These calls need no context. */
#include "simulated_runtime/runtime.h"

static cudaError_t find_device(int ordinal, CUdevice *device)
{
	RT_TRY(rt_start());
	return RT_CALL(cuDeviceGet, device, ordinal);
}

/* A number that the driver does not know is 0, as on a device without the feature. */
static cudaError_t property(int number, CUdevice device, int *value)
{
	*value = 0;
	cudaError_t error = RT_CALL(cuDeviceGetAttribute, value, (CUdevice_attribute)number, device);
	return error == cudaErrorInvalidValue ? cudaSuccess : error;
}

#if RUNTIME_MAJOR == 12
#define PROPERTY_12(field, number) PROPERTY(field, number)
#define PROPERTY_13(field, number)
#else
#define PROPERTY_12(field, number)
#define PROPERTY_13(field, number) PROPERTY(field, number)
#endif

static cudaError_t fill_attributes(struct cudaDeviceProp *properties, CUdevice device)
{
	int value;
#define PROPERTY(field, number)                         \
	RT_TRY(property(number, device, &value));       \
	properties->field = (__typeof__(properties->field))value;
#include "simulated_runtime/properties.def"
#undef PROPERTY
	return cudaSuccess;
}

static cudaError_t device_properties(struct cudaDeviceProp *properties, int ordinal)
{
	CUdevice device;
	if (!properties)
		return cudaErrorInvalidValue;
	RT_TRY(find_device(ordinal, &device));
	*properties = (struct cudaDeviceProp){ 0 };
	RT_TRY(RT_CALL(cuDeviceGetName, properties->name, (int)sizeof(properties->name), device));
	RT_TRY(RT_CALL(cuDeviceGetUuid_v2, &properties->uuid, device));
	RT_TRY(RT_CALL(cuDeviceTotalMem_v2, &properties->totalGlobalMem, device));
	return fill_attributes(properties, device);
}

/* CUDA 12 programs call it by the name with the suffix. */
#if RUNTIME_MAJOR == 12
EXPORT cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int ordinal)
#else
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int ordinal)
#endif
{
	return rt_return(device_properties(properties, ordinal));
}

static cudaError_t device_attribute(int *value, CUdevice_attribute attribute, int ordinal)
{
	CUdevice device;
	RT_TRY(find_device(ordinal, &device));
	return RT_CALL(cuDeviceGetAttribute, value, attribute, device);
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, CUdevice_attribute attribute, int ordinal)
{
	return rt_return(device_attribute(value, attribute, ordinal));
}

static cudaError_t pci_bus_id(char *text, int bytes, int ordinal)
{
	CUdevice device;
	RT_TRY(find_device(ordinal, &device));
	return RT_CALL(cuDeviceGetPCIBusId, text, bytes, device);
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int ordinal)
{
	return rt_return(pci_bus_id(text, bytes, ordinal));
}

static cudaError_t can_access_peer(int *can, int ordinal, int peer_ordinal)
{
	CUdevice device, peer;
	RT_TRY(find_device(ordinal, &device));
	RT_TRY(find_device(peer_ordinal, &peer));
	return RT_CALL(cuDeviceCanAccessPeer, can, device, peer);
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer_ordinal)
{
	return rt_return(can_access_peer(can, ordinal, peer_ordinal));
}

static cudaError_t default_pool(cudaMemPool_t *pool, int ordinal)
{
	CUdevice device;
	RT_TRY(find_device(ordinal, &device));
	return RT_CALL(cuDeviceGetDefaultMemPool, pool, device);
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int ordinal)
{
	return rt_return(default_pool(pool, ordinal));
}

static cudaError_t get_graph_memory(int ordinal, CUgraphMem_attribute attribute, void *value)
{
	CUdevice device;
	RT_TRY(find_device(ordinal, &device));
	return RT_CALL(cuDeviceGetGraphMemAttribute, device, attribute, value);
}

EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int ordinal, CUgraphMem_attribute attribute, void *value)
{
	return rt_return(get_graph_memory(ordinal, attribute, value));
}

static cudaError_t set_graph_memory(int ordinal, CUgraphMem_attribute attribute, void *value)
{
	CUdevice device;
	RT_TRY(find_device(ordinal, &device));
	return RT_CALL(cuDeviceSetGraphMemAttribute, device, attribute, value);
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int ordinal, CUgraphMem_attribute attribute, void *value)
{
	return rt_return(set_graph_memory(ordinal, attribute, value));
}
