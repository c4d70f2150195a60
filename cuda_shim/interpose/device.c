/* Devices, and what the container sees of their memory: its share, never the whole. */
#include <string.h>

#include "interpose/context.h"
#include "interpose/deferred.h"
#include "interpose/driver.h"
#include "interpose/reservoir.h"
#include "shim.h"

/* Written once, between the driver's cuInit and the first limited call. */
static struct {
	unsigned char uuid[16];
	_Atomic int device;
} devices[AQ_MAX_ORDINALS];
static int device_count;

CUresult aq_devices_learn(void)
{
	int count = 0;
	CUresult result = aq_cuda.cuDeviceGetCount(&count);

	if (result != CUDA_SUCCESS)
		return result;
	device_count = count < AQ_MAX_ORDINALS ? count : AQ_MAX_ORDINALS;
	for (int i = 0; i < device_count; i++) {
		CUuuid uuid = { { 0 } };

		/* The newer form answers with the MIG instance's own UUID, the older one with its GPU's. */
		result = aq_cuda.cuDeviceGetUuid_v2(&uuid, i);
		if (result == CUDA_ERROR_NOT_SUPPORTED)
			result = aq_cuda.cuDeviceGetUuid(&uuid, i);
		if (result != CUDA_SUCCESS)
			return result;
		memcpy(devices[i].uuid, uuid.bytes, sizeof(devices[i].uuid));
		atomic_store_explicit(&devices[i].device, aq_limits_find(aq_limits, devices[i].uuid), memory_order_relaxed);
	}
	return CUDA_SUCCESS;
}

bool aq_device_is_only(void)
{
	return device_count == 1;
}

int aq_device_of(CUdevice ordinal)
{
	if (ordinal < 0 || ordinal >= device_count)
		return AQ_NO_DEVICE;
	int device = atomic_load_explicit(&devices[ordinal].device, memory_order_relaxed);
	if (device == AQ_NO_DEVICE) { /* it may have been granted since */
		aq_limits_refresh(aq_limits);
		device = aq_limits_find(aq_limits, devices[ordinal].uuid);
		atomic_store_explicit(&devices[ordinal].device, device, memory_order_relaxed);
	}
	return device;
}

const char *aq_device_uuid(int device)
{
	return device < 0 ? NULL : aq_limits->device[device].uuid_text;
}

CUresult cuInit(unsigned int flags)
{
	return aq_start(flags);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuDeviceTotalMem_v2(bytes, ordinal));
	CUresult result = aq_cuda.cuDeviceTotalMem_v2(bytes, ordinal);

	if (result == CUDA_SUCCESS)
		*bytes = aq_account_view(aq_device_of(ordinal), *bytes, *bytes).total_bytes;
	return result;
}

static unsigned int narrow(size_t bytes)
{
	return bytes < UINT32_MAX ? (unsigned int)bytes : UINT32_MAX;
}

/* The form of CUDA 2, whose sizes are 32 bits wide. */
CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuDeviceTotalMem(bytes, ordinal));
	CUresult result = aq_cuda.cuDeviceTotalMem(bytes, ordinal);

	if (result == CUDA_SUCCESS)
		*bytes = narrow(aq_account_view(aq_device_of(ordinal), *bytes, *bytes).total_bytes);
	return result;
}

static struct aq_view view_of_thread(size_t physical_total, size_t physical_free)
{
	struct aq_place place = { .device = AQ_NO_DEVICE };

	aq_place_current(&place);
	if (place.device >= 0) {
		aq_deferred_settle();
		aq_reservoirs_settle(place.device);
		if (aq_account_shared(place.device))
			aq_reclaim_siblings();
	}
	return aq_account_view(place.device, physical_total, physical_free);
}

/* Programs ask for one of the two alone, with NULL for the other; what asking for neither means is the driver's to say. */
#define MEM_INFO_HOOK(name, amount, as_told)                                                                     \
	CUresult name(amount *free_bytes, amount *total_bytes)                                                   \
	{                                                                                                        \
		AQ_LIMITED_OR_RETURN(name(free_bytes, total_bytes));                                             \
		amount physical_free, physical_total;                                                            \
                                                                                                                 \
		if (!free_bytes && !total_bytes)                                                                 \
			return aq_cuda.name(NULL, NULL);                                                         \
		CUresult result = aq_cuda.name(&physical_free, &physical_total);                                 \
		if (result != CUDA_SUCCESS)                                                                      \
			return result;                                                                           \
		struct aq_view view = view_of_thread(physical_total, physical_free);                             \
		if (free_bytes)                                                                                  \
			*free_bytes = as_told(view.free_bytes);                                                  \
		if (total_bytes)                                                                                 \
			*total_bytes = as_told(view.total_bytes);                                                \
		return CUDA_SUCCESS;                                                                             \
	}

MEM_INFO_HOOK(cuMemGetInfo_v2, size_t, (size_t))
MEM_INFO_HOOK(cuMemGetInfo, unsigned int, narrow)
