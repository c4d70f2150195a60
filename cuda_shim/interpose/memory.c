/* SPDX-License-Identifier: Apache-2.0 */
/* Linear memory: charge, call the driver, record; on any failure leave everything as it was. */
#include "interpose/allocations.h"
#include "interpose/driver.h"
#include "interpose/relax.h"
#include "interpose/spread.h"
#include "shim.h"

/* ---- allocating ------------------------------------------------------------------------------------------------ */

static bool take_back(CUdeviceptr address)
{
	CUstreamCaptureMode mode = aq_relax();
	CUresult result = aq_cuda.cuMemFree_v2(address);

	aq_restrict(mode);
	return result == CUDA_SUCCESS;
}

/* Record or uncharge after the driver allocated, or failed to. What the driver does not take back stays charged. */
static CUresult settle(CUresult result, CUdeviceptr address, uint64_t bytes, enum aq_kind kind, const struct aq_place *place)
{
	if (result == CUDA_SUCCESS && aq_record(&aq_pointers, address, bytes, kind, place))
		return CUDA_SUCCESS;
	if (result != CUDA_SUCCESS || take_back(address))
		aq_uncharge(place->device, kind, bytes);
	return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

/* Charge what does not fit the device memory at once: `*charge` bytes for a request of `requested`. A container that oversubscribes then
 * holds it as virtual memory. Only when neither ledger has room is memory reclaimed from pools and dead siblings, which is slow. */
static __attribute__((noinline)) bool charge_tight(const struct aq_place *place, uint64_t requested, uint64_t *charge, enum aq_kind *kind)
{
	if (aq_account_oversubscribed(place->device)) {
		*kind = AQ_VIRTUAL;
		if (aq_charge_quick(place->device, AQ_VIRTUAL, *charge))
			return true;
		aq_reclaim(place->device);
		*kind = AQ_LINEAR;
		if (aq_charge_quick(place->device, AQ_LINEAR, *charge))
			return true;
		*kind = AQ_VIRTUAL;
	}
	*charge = requested;
	return aq_charge_footprint(place->device, *kind, charge);
}

/* Memory that the driver may move to the host and back, and keeps on the device while there is room. */
static __attribute__((noinline)) CUresult allocate_virtual(CUdeviceptr *made, size_t bytes, const struct aq_place *place)
{
	CUmemLocation here = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = place->ordinal };
	CUresult result = aq_cuda.cuMemAllocManaged(made, bytes, CU_MEM_ATTACH_GLOBAL);

	/* Only advice: memory that cannot follow it is memory all the same. Drivers before CUDA 12.2 have the older form alone. */
	if (result == CUDA_SUCCESS &&
	    aq_cuda.cuMemAdvise_v2(*made, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, here) == CUDA_ERROR_NOT_SUPPORTED)
		aq_cuda.cuMemAdvise(*made, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place->ordinal);
	return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	CUdeviceptr made = 0;
	struct aq_place place;
	uint64_t charge = aq_footprint_bytes(bytes);
	enum aq_kind kind = AQ_LINEAR;

	AQ_LIMITED_OR_RETURN(cuMemAlloc_v2(address, bytes));
	if (!address)
		return aq_cuda.cuMemAlloc_v2(address, bytes); /* the driver reports the error */
	CUresult result = aq_find_place(&place);
	if (result != CUDA_SUCCESS)
		return result;
	if (__builtin_expect(!aq_charge_quick(place.device, AQ_LINEAR, charge), 0) && !charge_tight(&place, bytes, &charge, &kind))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = __builtin_expect(kind == AQ_VIRTUAL, 0) ? allocate_virtual(&made, bytes, &place) : aq_cuda.cuMemAlloc_v2(&made, bytes);
	result = settle(result, made, charge, kind, &place);
	if (result == CUDA_SUCCESS)
		*address = made;
	return result;
}

/* The form of CUDA 2, with addresses and sizes of 32 bits. */
CUresult cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes)
{
	CUdeviceptr_v1 made = 0;
	struct aq_place place;
	uint64_t charge = bytes;

	AQ_LIMITED_OR_RETURN(cuMemAlloc(address, bytes));
	if (!address)
		return aq_cuda.cuMemAlloc(address, bytes); /* the driver reports the error */
	CUresult result = aq_find_place(&place);
	if (result != CUDA_SUCCESS)
		return result;
	if (!aq_charge_footprint(place.device, AQ_LINEAR, &charge))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = aq_cuda.cuMemAlloc(&made, bytes);
	result = settle(result, made, charge, AQ_LINEAR, &place);
	if (result == CUDA_SUCCESS)
		*address = made;
	return result;
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
	CUdeviceptr made = 0;
	struct aq_place place;
	uint64_t charge = bytes;

	AQ_LIMITED_OR_RETURN(cuMemAllocManaged(address, bytes, flags));
	if (!address)
		return aq_cuda.cuMemAllocManaged(address, bytes, flags); /* the driver reports the error */
	CUresult result = aq_find_place(&place);
	if (result != CUDA_SUCCESS)
		return result;
	enum aq_kind kind = aq_account_oversubscribed(place.device) ? AQ_VIRTUAL : AQ_MANAGED;
	if (!aq_charge_footprint(place.device, kind, &charge))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = aq_cuda.cuMemAllocManaged(&made, bytes, flags);
	result = settle(result, made, charge, kind, &place);
	if (result == CUDA_SUCCESS)
		*address = made;
	return result;
}

/* What rows of `pitch` bytes take; UINT64_MAX when that is more than any device has. */
static uint64_t pitched_bytes(uint64_t pitch, uint64_t height)
{
	uint64_t bytes;

	return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : bytes;
}

/* Rows turned out to take `taken` bytes, where `*charged` are charged. False when the rest does not fit. */
static bool settle_charge(const struct aq_place *place, uint64_t *charged, uint64_t taken)
{
	if (taken <= *charged)
		return true;
	if (!aq_charge(place->device, AQ_LINEAR, taken - *charged))
		return false;
	*charged = taken;
	return true;
}

struct pitched_call {
	CUdeviceptr made;
	size_t pitch;
	size_t width, height;
	unsigned int element_bytes;
	bool wants_pitch; /* the program wants the pitch; when the driver gets NULL for it, it stays as expected */
	bool narrow;      /* the form of CUDA 2 */
};

static CUresult make_pitched(struct pitched_call *call)
{
	CUdeviceptr_v1 made = 0;
	unsigned int pitch = 0;

	if (!call->narrow)
		return aq_cuda.cuMemAllocPitch_v2(&call->made, call->wants_pitch ? &call->pitch : NULL, call->width, call->height,
						  call->element_bytes);
	CUresult result = aq_cuda.cuMemAllocPitch(&made, call->wants_pitch ? &pitch : NULL, (unsigned int)call->width,
						  (unsigned int)call->height, call->element_bytes);
	call->made = made;
	call->pitch = pitch;
	return result;
}

static CUresult allocate_pitched(struct pitched_call *call, const struct aq_place *place)
{
	uint64_t charged = pitched_bytes(aq_whole_bytes(call->width, AQ_UNIT_BYTES), call->height); /* the least that a driver takes */

	if (!aq_charge_footprint(place->device, AQ_LINEAR, &charged))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = make_pitched(call);
	uint64_t taken = call->wants_pitch ? pitched_bytes(call->pitch, call->height) : charged;
	if (result == CUDA_SUCCESS && !settle_charge(place, &charged, taken)) {
		result = CUDA_ERROR_OUT_OF_MEMORY;
		if (!take_back(call->made)) {
			aq_charge_taken(place->device, AQ_LINEAR, taken - charged);
			return result;
		}
	}
	return settle(result, call->made, charged, AQ_LINEAR, place);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element_bytes)
{
	struct pitched_call call = { .width = width, .height = height, .element_bytes = element_bytes, .wants_pitch = pitch };
	struct aq_place place;

	AQ_LIMITED_OR_RETURN(cuMemAllocPitch_v2(address, pitch, width, height, element_bytes));
	if (!address)
		return aq_cuda.cuMemAllocPitch_v2(address, pitch, width, height, element_bytes); /* the driver reports the error */
	CUresult result = aq_find_place(&place);
	if (result != CUDA_SUCCESS)
		return result;
	result = allocate_pitched(&call, &place);
	if (result == CUDA_SUCCESS) {
		*address = call.made;
		if (pitch)
			*pitch = call.pitch;
	}
	return result;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *address, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element_bytes)
{
	struct pitched_call call = {
		.width = width, .height = height, .element_bytes = element_bytes, .wants_pitch = pitch, .narrow = true
	};
	struct aq_place place;

	AQ_LIMITED_OR_RETURN(cuMemAllocPitch(address, pitch, width, height, element_bytes));
	if (!address)
		return aq_cuda.cuMemAllocPitch(address, pitch, width, height, element_bytes); /* the driver reports the error */
	CUresult result = aq_find_place(&place);
	if (result != CUDA_SUCCESS)
		return result;
	result = allocate_pitched(&call, &place);
	if (result == CUDA_SUCCESS) {
		*address = (CUdeviceptr_v1)call.made;
		if (pitch)
			*pitch = (unsigned int)call.pitch;
	}
	return result;
}

/* ---- freeing --------------------------------------------------------------------------------------------------- */

CUresult cuMemFree_v2(CUdeviceptr address)
{
	struct aq_entry held;

	AQ_LIMITED_OR_RETURN(cuMemFree_v2(address));
	bool known = aq_map_take(&aq_pointers, address, &held);
	struct aq_spread *spread = aq_spread_of(address);
	CUresult result = aq_cuda.cuMemFree_v2(address);
	if (known)
		aq_freed(&aq_pointers, result, &held);
	aq_spread_ended(spread, result == CUDA_SUCCESS);
	return result;
}

CUresult cuMemFree(CUdeviceptr_v1 address)
{
	struct aq_entry held;

	AQ_LIMITED_OR_RETURN(cuMemFree(address));
	bool known = aq_map_take(&aq_pointers, address, &held);
	CUresult result = aq_cuda.cuMemFree(address);
	if (known)
		aq_freed(&aq_pointers, result, &held);
	return result;
}

/* ---- sharing --------------------------------------------------------------------------------------------------- */

/* Managed memory has no handle that another process could open. This error is clear even for a program that never requested managed
 * memory. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
	struct aq_entry held;

	AQ_LIMITED_OR_RETURN(cuIpcGetMemHandle(handle, address));
	if (aq_map_get(&aq_pointers, address, &held) && held.kind == AQ_VIRTUAL)
		return CUDA_ERROR_NOT_SUPPORTED;
	return aq_cuda.cuIpcGetMemHandle(handle, address);
}
