/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_texref.c - texture and surface references, which CUDA 12 no longer compiles.
 *
 * A driver still exports them, and programs that were linked with it do not start without. A reference that a program creates keeps its
 * settings. No image has one, so a module never returns one.
 */
#include <stdlib.h>

#include "simulated_driver/cuda_internal.h"

#define REFERENCE_MAGIC 0x54785266u
#define DIMENSIONS      3
#define MOST_CHANNELS   4

struct CUtexref_st {
	uint32_t magic;
	CUarray array;
	CUdeviceptr address;
	CUarray_format format;
	int channels;
	CUaddress_mode address_mode[DIMENSIONS];
	CUfilter_mode filter;
	unsigned int flags;
};

static CUresult check(CUtexref reference)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	return reference && reference->magic == REFERENCE_MAGIC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuTexRefCreate(CUtexref *out)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out);
	CUtexref reference = calloc(1, sizeof *reference);
	if (!reference)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*reference = (struct CUtexref_st){ .magic = REFERENCE_MAGIC, .format = CU_AD_FORMAT_FLOAT, .channels = 1 };
	*out = reference;
	return CUDA_SUCCESS;
}

CUresult cuTexRefDestroy(CUtexref reference)
{
	SIM_TRY(check(reference));
	reference->magic = 0;
	free(reference);
	return CUDA_SUCCESS;
}

/* ---- what it is bound to ---- */

CUresult cuTexRefSetArray(CUtexref reference, CUarray array, unsigned int flags)
{
	CUDA_ARRAY_DESCRIPTOR shape;
	SIM_TRY(check(reference));
	SIM_REQUIRE(flags == CU_TRSA_OVERRIDE_FORMAT);
	SIM_TRY(cuArrayGetDescriptor_v2(&shape, array));
	reference->array = array;
	reference->format = shape.Format;
	reference->channels = (int)shape.NumChannels;
	return CUDA_SUCCESS;
}

CUresult cuTexRefGetArray(CUarray *array, CUtexref reference)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(array && reference->array);
	*array = reference->array;
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetAddress_v2(size_t *offset, CUtexref reference, CUdeviceptr address, size_t bytes)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(address && bytes);
	if (offset)
		*offset = 0; /* allocations are aligned as textures need it */
	reference->address = address;
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetAddress2D_v3(CUtexref reference, const CUDA_ARRAY_DESCRIPTOR *shape, CUdeviceptr address, size_t pitch)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(shape && address && pitch);
	reference->address = address;
	reference->format = shape->Format;
	reference->channels = (int)shape->NumChannels;
	return CUDA_SUCCESS;
}

CUresult cuTexRefGetAddress_v2(CUdeviceptr *address, CUtexref reference)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(address && reference->address);
	*address = reference->address;
	return CUDA_SUCCESS;
}

/* ---- how it is read ---- */

CUresult cuTexRefSetFormat(CUtexref reference, CUarray_format format, int channels)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(channels > 0 && channels <= MOST_CHANNELS);
	reference->format = format;
	reference->channels = channels;
	return CUDA_SUCCESS;
}

CUresult cuTexRefGetFormat(CUarray_format *format, int *channels, CUtexref reference)
{
	SIM_TRY(check(reference));
	if (format)
		*format = reference->format;
	if (channels)
		*channels = reference->channels;
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetAddressMode(CUtexref reference, int dimension, CUaddress_mode mode)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(dimension >= 0 && dimension < DIMENSIONS && mode <= CU_TR_ADDRESS_MODE_BORDER);
	reference->address_mode[dimension] = mode;
	return CUDA_SUCCESS;
}

CUresult cuTexRefGetAddressMode(CUaddress_mode *mode, CUtexref reference, int dimension)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(mode && dimension >= 0 && dimension < DIMENSIONS);
	*mode = reference->address_mode[dimension];
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetFilterMode(CUtexref reference, CUfilter_mode mode)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(mode <= CU_TR_FILTER_MODE_LINEAR);
	reference->filter = mode;
	return CUDA_SUCCESS;
}

CUresult cuTexRefGetFilterMode(CUfilter_mode *mode, CUtexref reference)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(mode);
	*mode = reference->filter;
	return CUDA_SUCCESS;
}

CUresult cuTexRefSetFlags(CUtexref reference, unsigned int flags)
{
	SIM_TRY(check(reference));
	reference->flags = flags;
	return CUDA_SUCCESS;
}

CUresult cuTexRefGetFlags(unsigned int *flags, CUtexref reference)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(flags);
	*flags = reference->flags;
	return CUDA_SUCCESS;
}

/* ---- references of a module, which never has one ---- */

static CUresult not_in(CUmodule module, const void *out, const char *name)
{
	unsigned int functions;
	SIM_REQUIRE(out && name);
	SIM_TRY(cuModuleGetFunctionCount(&functions, module));
	return CUDA_ERROR_NOT_FOUND;
}

CUresult cuModuleGetTexRef(CUtexref *out, CUmodule module, const char *name)
{
	return not_in(module, out, name);
}

CUresult cuModuleGetSurfRef(CUsurfref *out, CUmodule module, const char *name)
{
	return not_in(module, out, name);
}

CUresult cuSurfRefSetArray(CUsurfref reference, CUarray array, unsigned int flags)
{
	(void)reference, (void)array, (void)flags;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuSurfRefGetArray(CUarray *array, CUsurfref reference)
{
	(void)array, (void)reference;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuParamSetTexRef(CUfunction function, int unit, CUtexref reference)
{
	SIM_TRY(check(reference));
	SIM_REQUIRE(function && unit == CU_PARAM_TR_DEFAULT);
	return CUDA_SUCCESS;
}
