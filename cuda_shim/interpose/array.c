/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays and mipmapped arrays. The driver reports the size in memory only of arrays with deferred memory (cuArrayGetMemoryRequirements). So
 * before the call the shim makes a twin of that kind, which takes no memory, and queries it. Where no such twin exists, the texels are
 * charged in tiles. */
#include "interpose/allocations.h"
#include "interpose/driver.h"
#include "interpose/relax.h"
#include "interpose/vmm.h"
#include "shim.h"

#define TILE_ROW_BYTES 512u /* rows and columns of a tile, at the least */
#define TILE_ROWS 8u
#define LEVELS_MAX 64u /* more than any array has: each level halves it */
#define NOT_BACKED (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) /* memory comes later, by cuMemCreate, and is charged there */

/* Per texel. What is not listed takes two: 16 bits normalised, video of 10, 12 and 16 bits, and formats newer than this list. */
static uint64_t channel_bytes(CUarray_format format)
{
	if (format >= CU_AD_FORMAT_BC1_UNORM && format <= CU_AD_FORMAT_BC7_UNORM_SRGB)
		return 1; /* at most */
	switch (format) {
	case CU_AD_FORMAT_UNSIGNED_INT8:
	case CU_AD_FORMAT_SIGNED_INT8:
	case CU_AD_FORMAT_UNORM_INT8X1:
	case CU_AD_FORMAT_UNORM_INT8X2:
	case CU_AD_FORMAT_UNORM_INT8X4:
	case CU_AD_FORMAT_SNORM_INT8X1:
	case CU_AD_FORMAT_SNORM_INT8X2:
	case CU_AD_FORMAT_SNORM_INT8X4:
	case CU_AD_FORMAT_UNORM_INT_101010_2: /* four channels in 32 bits */
	case CU_AD_FORMAT_UINT8_PACKED_422:
	case CU_AD_FORMAT_UINT8_PACKED_444:
	case CU_AD_FORMAT_UINT8_SEMIPLANAR_420:
	case CU_AD_FORMAT_UINT8_SEMIPLANAR_422:
	case CU_AD_FORMAT_UINT8_SEMIPLANAR_444:
	case CU_AD_FORMAT_UINT8_PLANAR_420:
	case CU_AD_FORMAT_UINT8_PLANAR_422:
	case CU_AD_FORMAT_UINT8_PLANAR_444:
	case CU_AD_FORMAT_NV12:
	case CU_AD_FORMAT_NV16:
	case CU_AD_FORMAT_YUY2:
	case CU_AD_FORMAT_AYUV:
	case CU_AD_FORMAT_Y444_PLANAR8:
	case CU_AD_FORMAT_YUV444_8bit_SemiPlanar: return 1;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT: return 4;
	default: return 2;
	}
}

static uint64_t at_least_one(uint64_t extent)
{
	return extent ? extent : 1;
}

/* Saturates: a product that does not fit is more than any device has. */
static uint64_t times(uint64_t a, uint64_t b)
{
	uint64_t product;

	return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* Without the driver's word: whole tiles for every plane of every level. Rows of one are treated as an array of one dimension. */
static uint64_t tiled_bytes(const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned int levels)
{
	uint64_t width = array->Width, height = at_least_one(array->Height), depth = at_least_one(array->Depth), bytes = 0;
	uint64_t texel_bytes = times(channel_bytes(array->Format), array->NumChannels);

	for (unsigned int level = 0; level < levels && level < LEVELS_MAX; level++) {
		uint64_t row = aq_whole_bytes(times(width, texel_bytes), TILE_ROW_BYTES);
		uint64_t level_bytes = times(times(row, height > 1 ? aq_whole_bytes(height, TILE_ROWS) : 1), depth);

		if (__builtin_add_overflow(bytes, level_bytes, &bytes))
			return UINT64_MAX;
		width = at_least_one(width / 2);
		height = at_least_one(height / 2);
		if (!(array->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP))) /* there, depth counts layers */
			depth = at_least_one(depth / 2);
	}
	return bytes;
}

/* ---- the common course ----------------------------------------------------------------------------------------- */

struct array_call {
	CUDA_ARRAY3D_DESCRIPTOR shape;
	unsigned int levels;
	CUresult (*create)(struct array_call *call);
	/* The memory for an array of this shape, with Flags that defer its memory. */
	CUresult (*query)(const CUDA_ARRAY3D_DESCRIPTOR *twin, unsigned int levels, CUdevice ordinal, uint64_t *bytes);
	CUresult (*destroy)(uint64_t made);
	const void *descriptor; /* as the program passed it */
	uint64_t made;
};

static uint64_t needed_bytes(const struct array_call *call, CUdevice ordinal)
{
	CUDA_ARRAY3D_DESCRIPTOR twin = call->shape;
	uint64_t bytes = 0;

	if (call->shape.Flags & NOT_BACKED)
		return 0;
	twin.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
	CUstreamCaptureMode mode = aq_relax();
	CUresult result = call->query(&twin, call->levels, ordinal, &bytes);
	aq_restrict(mode);
	return result == CUDA_SUCCESS && bytes ? bytes : tiled_bytes(&call->shape, call->levels);
}

static CUresult create_charged(struct array_call *call)
{
	struct aq_place place;

	CUresult result = aq_find_place(&place);
	if (result != CUDA_SUCCESS)
		return result;
	uint64_t bytes = needed_bytes(call, place.ordinal);
	if (!aq_charge_footprint(place.device, AQ_ARRAY, &bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = call->create(call);
	if (result == CUDA_SUCCESS && aq_record(&aq_arrays, call->made, bytes, AQ_ARRAY, &place))
		return CUDA_SUCCESS;
	bool held = false;
	if (result == CUDA_SUCCESS) {
		CUstreamCaptureMode mode = aq_relax();
		held = call->destroy(call->made) != CUDA_SUCCESS;
		aq_restrict(mode);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!held)
		aq_uncharge(place.device, AQ_ARRAY, bytes);
	return result;
}

/* ---- arrays ---------------------------------------------------------------------------------------------------- */

static CUresult query_array(const CUDA_ARRAY3D_DESCRIPTOR *twin, unsigned int levels, CUdevice ordinal, uint64_t *bytes)
{
	CUDA_ARRAY_MEMORY_REQUIREMENTS needs = { 0 };
	CUarray made = NULL;

	(void)levels;
	CUresult result = aq_cuda.cuArray3DCreate_v2(&made, twin);
	if (result != CUDA_SUCCESS)
		return result;
	result = aq_cuda.cuArrayGetMemoryRequirements(&needs, made, ordinal);
	aq_cuda.cuArrayDestroy(made);
	*bytes = needs.size;
	return result;
}

static CUresult destroy_array(uint64_t made)
{
	return aq_cuda.cuArrayDestroy((CUarray)(uintptr_t)made);
}

#define CREATE_WITH(function)                                                                     \
	static CUresult with_##function(struct array_call *call)                                  \
	{                                                                                         \
		CUarray made = NULL;                                                              \
		CUresult result = aq_cuda.function(&made, call->descriptor);                      \
		call->made = (uintptr_t)made;                                                     \
		return result;                                                                    \
	}

CREATE_WITH(cuArrayCreate)
CREATE_WITH(cuArrayCreate_v2)
CREATE_WITH(cuArray3DCreate)
CREATE_WITH(cuArray3DCreate_v2)

static CUresult create_array(CUarray *array, const void *descriptor, CUDA_ARRAY3D_DESCRIPTOR shape, CUresult (*create)(struct array_call *))
{
	struct array_call call = {
		.shape = shape, .levels = 1, .create = create, .query = query_array, .destroy = destroy_array, .descriptor = descriptor
	};
	CUresult result = create_charged(&call);

	if (result == CUDA_SUCCESS)
		*array = (CUarray)(uintptr_t)call.made;
	return result;
}

#define SHAPE_2D(d) \
	((CUDA_ARRAY3D_DESCRIPTOR){ .Width = (d)->Width, .Height = (d)->Height, .Format = (d)->Format, .NumChannels = (d)->NumChannels })
#define SHAPE_3D(d) ((CUDA_ARRAY3D_DESCRIPTOR){ .Width = (d)->Width, .Height = (d)->Height, .Depth = (d)->Depth, .Format = (d)->Format, \
						.NumChannels = (d)->NumChannels, .Flags = (d)->Flags })

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
	AQ_LIMITED_OR_RETURN(cuArrayCreate(array, descriptor));
	if (!array || !descriptor)
		return aq_cuda.cuArrayCreate(array, descriptor);
	return create_array(array, descriptor, SHAPE_2D(descriptor), with_cuArrayCreate);
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
	AQ_LIMITED_OR_RETURN(cuArrayCreate_v2(array, descriptor));
	if (!array || !descriptor)
		return aq_cuda.cuArrayCreate_v2(array, descriptor);
	return create_array(array, descriptor, SHAPE_2D(descriptor), with_cuArrayCreate_v2);
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
	AQ_LIMITED_OR_RETURN(cuArray3DCreate(array, descriptor));
	if (!array || !descriptor)
		return aq_cuda.cuArray3DCreate(array, descriptor);
	return create_array(array, descriptor, SHAPE_3D(descriptor), with_cuArray3DCreate);
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	AQ_LIMITED_OR_RETURN(cuArray3DCreate_v2(array, descriptor));
	if (!array || !descriptor)
		return aq_cuda.cuArray3DCreate_v2(array, descriptor);
	return create_array(array, descriptor, SHAPE_3D(descriptor), with_cuArray3DCreate_v2);
}

CUresult cuArrayDestroy(CUarray array)
{
	struct aq_entry held;

	AQ_LIMITED_OR_RETURN(cuArrayDestroy(array));
	bool known = aq_map_take(&aq_arrays, (uintptr_t)array, &held);
	struct aq_tile *tiles = aq_vmm_array_ending((uintptr_t)array);
	CUresult result = aq_cuda.cuArrayDestroy(array);
	if (known)
		aq_freed(&aq_arrays, result, &held);
	aq_vmm_array_ended((uintptr_t)array, tiles, result);
	return result;
}

/* ---- mipmapped arrays ------------------------------------------------------------------------------------------ */

static CUresult query_mipmapped(const CUDA_ARRAY3D_DESCRIPTOR *twin, unsigned int levels, CUdevice ordinal, uint64_t *bytes)
{
	CUDA_ARRAY_MEMORY_REQUIREMENTS needs = { 0 };
	CUmipmappedArray made = NULL;
	CUresult result = aq_cuda.cuMipmappedArrayCreate(&made, twin, levels);

	if (result != CUDA_SUCCESS)
		return result;
	result = aq_cuda.cuMipmappedArrayGetMemoryRequirements(&needs, made, ordinal);
	aq_cuda.cuMipmappedArrayDestroy(made);
	*bytes = needs.size;
	return result;
}

static CUresult destroy_mipmapped(uint64_t made)
{
	return aq_cuda.cuMipmappedArrayDestroy((CUmipmappedArray)(uintptr_t)made);
}

static CUresult create_mipmapped(struct array_call *call)
{
	CUmipmappedArray made = NULL;
	CUresult result = aq_cuda.cuMipmappedArrayCreate(&made, call->descriptor, call->levels);

	call->made = (uintptr_t)made;
	return result;
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels)
{
	AQ_LIMITED_OR_RETURN(cuMipmappedArrayCreate(array, descriptor, levels));
	if (!array || !descriptor)
		return aq_cuda.cuMipmappedArrayCreate(array, descriptor, levels);
	struct array_call call = { .shape = *descriptor,
				   .levels = levels,
				   .create = create_mipmapped,
				   .query = query_mipmapped,
				   .destroy = destroy_mipmapped,
				   .descriptor = descriptor };
	CUresult result = create_charged(&call);
	if (result == CUDA_SUCCESS)
		*array = (CUmipmappedArray)(uintptr_t)call.made;
	return result;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
	struct aq_entry held;

	AQ_LIMITED_OR_RETURN(cuMipmappedArrayDestroy(array));
	bool known = aq_map_take(&aq_arrays, (uintptr_t)array, &held);
	struct aq_tile *tiles = aq_vmm_array_ending((uintptr_t)array);
	CUresult result = aq_cuda.cuMipmappedArrayDestroy(array);
	if (known)
		aq_freed(&aq_arrays, result, &held);
	aq_vmm_array_ended((uintptr_t)array, tiles, result);
	return result;
}
