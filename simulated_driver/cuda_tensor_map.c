/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_tensor_map.c - tensor maps: descriptors for the copy engine of compute capability 9.0 and newer. What the header of CUDA 13 demands
 * of the arguments is checked. A descriptor is opaque, and no simulated kernel reads it: it holds the address and what was asked for.
 */
#include <string.h>

#include "simulated_driver/cuda_internal.h"

#define MAP_ALIGNMENT 64u /* the type has 128 since CUDA 13, the calls take less */
#define MOST_DIMENSIONS 5u
#define MOST_STRIDE (UINT64_C(1) << 40)
#define MOST_LENGTH (UINT64_C(1) << 31)
#define MOST_BOX 256u
#define MOST_ELEMENT_STRIDE 8u
#define MOST_PIXELS 1024u

struct tensor {
	CUtensorMapDataType type;
	cuuint32_t rank;
	void *address;
	const cuuint64_t *lengths, *strides;
	const cuuint32_t *element_strides;
	CUtensorMapInterleave interleave;
	CUtensorMapSwizzle swizzle;
	CUtensorMapL2promotion promotion;
	CUtensorMapFloatOOBfill fill;
};

static uint32_t element_bytes(CUtensorMapDataType type)
{
	static const uint8_t bytes[] = { 1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4 };
	return (unsigned)type < sizeof bytes ? bytes[type] : 1;
}

static bool is_packed_for_16(CUtensorMapDataType type)
{
	return type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B || type == CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B;
}

static bool is_float(CUtensorMapDataType type)
{
	return type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ;
}

/* Alignment of the address and of strides. */
static uint64_t alignment_of(const struct tensor *t)
{
	return t->interleave == CU_TENSOR_MAP_INTERLEAVE_32B || is_packed_for_16(t->type) ? 32 : 16;
}

static CUresult check_kinds(const struct tensor *t)
{
	SIM_REQUIRE((unsigned)t->type <= CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B);
	SIM_REQUIRE((unsigned)t->interleave <= CU_TENSOR_MAP_INTERLEAVE_32B);
	SIM_REQUIRE((unsigned)t->swizzle <= CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B);
	SIM_REQUIRE((unsigned)t->promotion <= CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
	SIM_REQUIRE((unsigned)t->fill <= CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA);
	SIM_REQUIRE(t->fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || is_float(t->type));
	SIM_REQUIRE(t->interleave != CU_TENSOR_MAP_INTERLEAVE_32B || t->swizzle == CU_TENSOR_MAP_SWIZZLE_32B);
	SIM_REQUIRE(t->type != CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B || t->interleave == CU_TENSOR_MAP_INTERLEAVE_NONE);
	return CUDA_SUCCESS;
}

static CUresult check_shape(const struct tensor *t)
{
	SIM_REQUIRE(t->rank >= 1 && t->rank <= MOST_DIMENSIONS && (t->interleave == CU_TENSOR_MAP_INTERLEAVE_NONE || t->rank >= 3));
	SIM_REQUIRE(t->address && (uintptr_t)t->address % alignment_of(t) == 0);
	SIM_REQUIRE(t->lengths && t->element_strides && (t->strides || t->rank == 1));
	for (unsigned i = 0; i < t->rank; i++) {
		SIM_REQUIRE(t->lengths[i] && t->lengths[i] <= MOST_LENGTH);
		SIM_REQUIRE(t->element_strides[i] && t->element_strides[i] <= MOST_ELEMENT_STRIDE);
		SIM_REQUIRE(i + 1 == t->rank || (t->strides[i] % alignment_of(t) == 0 && t->strides[i] < MOST_STRIDE));
	}
	SIM_REQUIRE(!is_packed_for_16(t->type) || t->lengths[0] % 128 == 0);
	SIM_REQUIRE(t->type != CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B || t->lengths[0] % 2 == 0);
	return CUDA_SUCCESS;
}

/* The innermost side of what one copy takes, in elements. */
static CUresult check_inner(const struct tensor *t, uint32_t elements)
{
	uint64_t bytes = (uint64_t)elements * element_bytes(t->type);
	uint64_t span = t->swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32 : t->swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
	if (is_packed_for_16(t->type))
		return elements == 128 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if (t->type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B)
		bytes = elements / 2;
	SIM_REQUIRE(t->interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || bytes % 16 == 0);
	SIM_REQUIRE(t->interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || t->swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || bytes <= span);
	return CUDA_SUCCESS;
}

static CUresult check_tensor(CUtensorMap *map, const struct tensor *t)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(map && (uintptr_t)map % MAP_ALIGNMENT == 0);
	if (context->device->hardware->compute_major < 9)
		return CUDA_ERROR_NOT_SUPPORTED;
	SIM_TRY(check_kinds(t));
	return check_shape(t);
}

static void encode(CUtensorMap *map, const struct tensor *t)
{
	memset(map, 0, sizeof *map);
	map->opaque[0] = (uintptr_t)t->address;
	map->opaque[1] = (uint64_t)t->type | (uint64_t)t->rank << 8 | (uint64_t)t->interleave << 16 | (uint64_t)t->swizzle << 24 |
			 (uint64_t)t->promotion << 32 | (uint64_t)t->fill << 40;
	for (unsigned i = 0; i < t->rank; i++) {
		map->opaque[2 + i] = t->lengths[i];
		map->opaque[7 + i] = i + 1 < t->rank ? t->strides[i] : 0;
	}
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *lengths,
				const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
				CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
				CUtensorMapFloatOOBfill fill)
{
	struct tensor t = { type, rank, address, lengths, strides, element_strides, interleave, swizzle, promotion, fill };
	SIM_TRY(check_tensor(map, &t));
	SIM_REQUIRE(box);
	for (unsigned i = 0; i < rank; i++)
		SIM_REQUIRE(box[i] && box[i] <= MOST_BOX);
	SIM_TRY(check_inner(&t, box[0]));
	encode(map, &t);
	return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *lengths,
				 const cuuint64_t *strides, const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels,
				 const cuuint32_t *element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
				 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
	struct tensor t = { type, rank, address, lengths, strides, element_strides, interleave, swizzle, promotion, fill };
	SIM_TRY(check_tensor(map, &t));
	SIM_REQUIRE(rank >= 3 && lower && upper && channels && channels <= MOST_BOX && pixels && pixels <= MOST_PIXELS);
	SIM_TRY(check_inner(&t, channels));
	encode(map, &t);
	return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(map && (uintptr_t)map % MAP_ALIGNMENT == 0 && address && (uintptr_t)address % 16 == 0);
	map->opaque[0] = (uintptr_t)address;
	return CUDA_SUCCESS;
}
