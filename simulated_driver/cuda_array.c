/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_array.c - CUDA arrays and mipmapped arrays: linear memory with rows of 512 bytes' multiple, which is how their size is reckoned.
 *
 * As in cuda.h, only arrays of deferred mapping report their memory requirements. They never get memory here: no memory can be mapped to
 * them.
 */
#include <stdlib.h>

#include "simulated_driver/cuda_internal.h"

#define ROW_BYTES 512u
#define ARRAY_ALIGNMENT 512u
#define MAX_LEVELS 18

struct CUmipmappedArray_st {
	struct sim_object object;
	CUcontext context;
	CUDA_ARRAY3D_DESCRIPTOR descriptor;
	CUdeviceptr memory;
	uint64_t bytes;
	unsigned n_levels;
	CUarray levels[MAX_LEVELS];
};

uint32_t sim_array_texel_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	if (descriptor->NumChannels != 1 && descriptor->NumChannels != 2 && descriptor->NumChannels != 4)
		return 0;
	switch (descriptor->Format) {
	case CU_AD_FORMAT_UNSIGNED_INT8:
	case CU_AD_FORMAT_SIGNED_INT8: return descriptor->NumChannels;
	case CU_AD_FORMAT_UNSIGNED_INT16:
	case CU_AD_FORMAT_SIGNED_INT16:
	case CU_AD_FORMAT_UNORM_INT16X1:
	case CU_AD_FORMAT_UNORM_INT16X2:
	case CU_AD_FORMAT_UNORM_INT16X4:
	case CU_AD_FORMAT_SNORM_INT16X1:
	case CU_AD_FORMAT_SNORM_INT16X2:
	case CU_AD_FORMAT_SNORM_INT16X4:
	case CU_AD_FORMAT_HALF: return 2 * descriptor->NumChannels;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT: return 4 * descriptor->NumChannels;
	default: return 0; /* block-compressed and video formats are not simulated */
	}
}

static CUresult check(const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	const unsigned known = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_TEXTURE_GATHER |
			       CUDA_ARRAY3D_DEFERRED_MAPPING;
	SIM_REQUIRE(descriptor->Width && sim_array_texel_bytes(descriptor));
	SIM_REQUIRE(!(descriptor->Depth && !descriptor->Height) || (descriptor->Flags & CUDA_ARRAY3D_LAYERED));
	SIM_REQUIRE(descriptor->Width <= 131072 && descriptor->Height <= 65536 && descriptor->Depth <= 16384);
	if (descriptor->Flags & CUDA_ARRAY3D_SPARSE)
		return CUDA_ERROR_NOT_SUPPORTED;
	return descriptor->Flags & ~known ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static bool is_deferred(const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	return descriptor->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING;
}

static uint64_t at_least_one(uint64_t n)
{
	return n ? n : 1;
}

static void measure(CUarray array)
{
	uint64_t row = array->descriptor.Width * sim_array_texel_bytes(&array->descriptor);
	array->pitch = (row + ROW_BYTES - 1) / ROW_BYTES * ROW_BYTES;
	array->rows = at_least_one(array->descriptor.Height);
	array->planes = at_least_one(array->descriptor.Depth);
	array->bytes = array->pitch * array->rows * array->planes;
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && descriptor);
	SIM_TRY(check(descriptor));
	SIM_TRY(sim_capture_unsafe_call());
	CUarray array = sim_object_new(SIM_KIND_ARRAY, sizeof *array);
	if (!array)
		return CUDA_ERROR_OUT_OF_MEMORY;
	array->context = context;
	array->descriptor = *descriptor;
	measure(array);
	CUresult result = is_deferred(descriptor) ? CUDA_SUCCESS
						  : sim_memory_allocate(context->device, context, array->bytes, &array->memory);
	if (result == CUDA_SUCCESS)
		*out = array;
	else
		sim_object_delete(array);
	return result;
}

CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	return create(out, descriptor);
}

CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
	SIM_REQUIRE(descriptor);
	CUDA_ARRAY3D_DESCRIPTOR full = { .Width = descriptor->Width,
					 .Height = descriptor->Height,
					 .Format = descriptor->Format,
					 .NumChannels = descriptor->NumChannels };
	return create(out, &full);
}

CUresult cuArrayDestroy(CUarray array)
{
	SIM_REQUIRE_READY();
	if (!sim_is(array, SIM_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	if (array->mipmap)
		return CUDA_ERROR_INVALID_HANDLE;   /* a level goes with its mipmap */
	sim_engine_wait_copies(&array->context->device->engine);
	CUresult result = array->memory ? sim_memory_free(array->memory) : CUDA_SUCCESS;
	sim_object_delete(array);
	return result;
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(descriptor);
	if (!sim_is(array, SIM_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	*descriptor = array->descriptor;
	return CUDA_SUCCESS;
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array)
{
	CUDA_ARRAY3D_DESCRIPTOR full;
	SIM_REQUIRE(descriptor);
	SIM_TRY(cuArray3DGetDescriptor_v2(&full, array));
	*descriptor = (CUDA_ARRAY_DESCRIPTOR){ full.Width, full.Height, full.Format, full.NumChannels };
	return CUDA_SUCCESS;
}

static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, uint64_t bytes,
			     CUdevice device)
{
	SIM_REQUIRE(out && is_deferred(descriptor));
	if (!sim_device_of(device))
		return CUDA_ERROR_INVALID_DEVICE;
	*out = (CUDA_ARRAY_MEMORY_REQUIREMENTS){ .size = bytes, .alignment = ARRAY_ALIGNMENT };
	return CUDA_SUCCESS;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray array, CUdevice device)
{
	SIM_REQUIRE_READY();
	if (!sim_is(array, SIM_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	return requirements(out, &array->descriptor, array->bytes, device);
}

/* ---- mipmaps --------------------------------------------------------------------------------------------------------- */

static uint64_t halved(uint64_t extent, unsigned level)
{
	return extent ? at_least_one(extent >> level) : 0;
}

static void delete_levels(CUmipmappedArray mipmap)
{
	for (unsigned i = 0; i < mipmap->n_levels; i++)
		sim_object_delete(mipmap->levels[i]);
	sim_object_delete(mipmap);
}

/* Describe every level; their memory follows one another in one allocation. */
static bool add_levels(CUmipmappedArray mipmap, unsigned count)
{
	for (; mipmap->n_levels < count; mipmap->n_levels++) {
		unsigned level = mipmap->n_levels;
		CUarray array = sim_object_new(SIM_KIND_ARRAY, sizeof *array);
		if (!array)
			return false;
		array->context = mipmap->context;
		array->mipmap = mipmap;
		array->descriptor = mipmap->descriptor;
		array->descriptor.Width = halved(mipmap->descriptor.Width, level);
		array->descriptor.Height = halved(mipmap->descriptor.Height, level);
		if (!(mipmap->descriptor.Flags & CUDA_ARRAY3D_LAYERED))
			array->descriptor.Depth = halved(mipmap->descriptor.Depth, level);
		measure(array);
		mipmap->bytes += array->bytes;
		mipmap->levels[level] = array;
	}
	return true;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && descriptor && levels);
	SIM_TRY(check(descriptor));
	SIM_TRY(sim_capture_unsafe_call());
	uint64_t longest = descriptor->Width > descriptor->Height ? descriptor->Width : descriptor->Height;
	unsigned most = 64 - (unsigned)__builtin_clzll(longest);
	CUmipmappedArray mipmap = sim_object_new(SIM_KIND_MIPMAP, sizeof *mipmap);
	if (!mipmap)
		return CUDA_ERROR_OUT_OF_MEMORY;
	mipmap->context = context;
	mipmap->descriptor = *descriptor;
	CUresult result = add_levels(mipmap, levels < most ? levels : most) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS && !is_deferred(descriptor))
		result = sim_memory_allocate(context->device, context, mipmap->bytes, &mipmap->memory);
	if (result != CUDA_SUCCESS) {
		delete_levels(mipmap);
		return result;
	}
	CUdeviceptr at = mipmap->memory;
	for (unsigned i = 0; mipmap->memory && i < mipmap->n_levels; i++) {
		mipmap->levels[i]->memory = at;
		at += mipmap->levels[i]->bytes;
	}
	*out = mipmap;
	return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray mipmap, unsigned int level)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(out);
	if (!sim_is(mipmap, SIM_KIND_MIPMAP))
		return CUDA_ERROR_INVALID_HANDLE;
	SIM_REQUIRE(level < mipmap->n_levels);
	*out = mipmap->levels[level];
	return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray mipmap, CUdevice device)
{
	SIM_REQUIRE_READY();
	if (!sim_is(mipmap, SIM_KIND_MIPMAP))
		return CUDA_ERROR_INVALID_HANDLE;
	return requirements(out, &mipmap->descriptor, mipmap->bytes, device);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray mipmap)
{
	SIM_REQUIRE_READY();
	if (!sim_is(mipmap, SIM_KIND_MIPMAP))
		return CUDA_ERROR_INVALID_HANDLE;
	sim_engine_wait_copies(&mipmap->context->device->engine);
	CUresult result = mipmap->memory ? sim_memory_free(mipmap->memory) : CUDA_SUCCESS;
	delete_levels(mipmap);
	return result;
}
