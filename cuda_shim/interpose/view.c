/* SPDX-License-Identifier: Apache-2.0 */
/* What the container sees of a device's memory: its share, never the whole. */
#include "interpose/context.h"
#include "interpose/deferred.h"
#include "interpose/driver.h"
#include "interpose/reservoir.h"
#include "shim.h"

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

/* The form of CUDA 2, with sizes of 32 bits. */
CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice ordinal)
{
	AQ_LIMITED_OR_RETURN(cuDeviceTotalMem(bytes, ordinal));
	CUresult result = aq_cuda.cuDeviceTotalMem(bytes, ordinal);

	if (result == CUDA_SUCCESS)
		*bytes = narrow(aq_account_view(aq_device_of(ordinal), *bytes, *bytes).total_bytes);
	return result;
}

/* The charges follow the driver first. This path is short, so it names the two parts that may have changed and sends no event. */
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

/* Programs may query one of the two alone, with NULL for the other; the driver decides what a query for neither means. */
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
