/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_link.c - linking: the kernels and variables of all inputs, written as one cubin that cuModuleLoadData takes.
 *
 * PTX counts as compiled, and its text as its code. Host objects and archives are searched for the fat binaries in them. Where inputs have
 * the same name, the first counts.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "simulated_driver/cuda_internal.h"

#define HEADER_BYTES 16u /* of a fat binary */

struct CUlinkState_st {
	struct sim_object object;
	struct sim_image image;
	uint8_t *cubin;
};

static CUresult check(CUlinkState state)
{
	SIM_REQUIRE_READY();
	return sim_is(state, SIM_KIND_LINK) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- merging ----------------------------------------------------------------------------------------------------------- */

static bool has_variable(const struct sim_image *image, const char *name)
{
	for (uint32_t i = 0; i < image->n_variables; i++)
		if (strcmp(image->variables[i].name, name) == 0)
			return true;
	return false;
}

static bool move_kernel(struct sim_image *to, struct sim_image_kernel *kernel)
{
	if (sim_image_kernel(to, kernel->name))
		return true;
	struct sim_image_kernel *moved = sim_image_add_kernel(to, strdup(kernel->name));
	if (!moved)
		return false;
	char *name = moved->name;
	*moved = *kernel;
	moved->name = name;
	kernel->parameters = NULL;
	return true;
}

/* Each variable in a block of its own. */
static bool move_variable(struct sim_image *to, const struct sim_image *from, const struct sim_image_variable *variable)
{
	const struct sim_image_block *block = &from->blocks[variable->block];
	if (has_variable(to, variable->name))
		return true;
	uint32_t index = sim_image_add_block(to, block->is_managed);
	struct sim_image_variable *moved = index == UINT32_MAX ? NULL : sim_image_add_variable(to, strdup(variable->name), variable->bytes);
	if (!moved)
		return false;
	moved->block = index;
	struct sim_image_block *own = &to->blocks[index];
	own->bytes = variable->bytes;
	if (variable->offset >= block->initial_bytes)
		return true;
	uint64_t known = block->initial_bytes - variable->offset;
	own->initial_bytes = known < variable->bytes ? known : variable->bytes;
	own->initial = malloc(own->initial_bytes);
	if (!own->initial)
		own->initial_bytes = 0;
	else
		memcpy(own->initial, block->initial + variable->offset, own->initial_bytes);
	return own->initial != NULL;
}

static CUresult merge(struct sim_image *to, struct sim_image *from)
{
	to->code_bytes += from->code_bytes;
	to->calls_malloc |= from->calls_malloc;
	to->calls_printf |= from->calls_printf;
	for (uint32_t i = 0; i < from->n_kernels; i++)
		if (!move_kernel(to, &from->kernels[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	for (uint32_t i = 0; i < from->n_variables; i++)
		if (!move_variable(to, from, &from->variables[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	return CUDA_SUCCESS;
}

static CUresult add_image(CUlinkState state, struct sim_view input)
{
	struct sim_image image;
	CUresult result = sim_image_read(input, state->image.capability, &image);
	if (result == CUDA_SUCCESS)
		result = merge(&state->image, &image);
	sim_image_free(&image);
	return result;
}

/* Device code for other architectures, and input without any, adds nothing. Members of an archive are aligned to two bytes only, so a fat
 * binary may begin anywhere. */
static CUresult add_embedded(CUlinkState state, struct sim_view object)
{
	static const uint32_t magic = SIM_FATBIN_MAGIC;
	const uint8_t *end = object.bytes + object.length, *at = object.bytes;
	for (; (at = memmem(at, (size_t)(end - at), &magic, sizeof magic)); at += sizeof magic) {
		struct sim_view fatbin, rest = { at, (uint64_t)(end - at) };
		uint64_t bytes = 0;
		if (!sim_view_read(rest, 8, &bytes, sizeof bytes) || bytes > rest.length ||
		    !sim_view_part(rest, 0, HEADER_BYTES + bytes, &fatbin))
			continue;
		CUresult result = add_image(state, fatbin);
		if (result == CUDA_ERROR_OUT_OF_MEMORY)
			return result;
	}
	return CUDA_SUCCESS;
}

static CUresult add(CUlinkState state, CUjitInputType type, struct sim_view input)
{
	if (state->cubin)
		return CUDA_ERROR_INVALID_VALUE;
	switch (type) {
	case CU_JIT_INPUT_PTX: input.length = strnlen((const char *)input.bytes, input.length); return add_image(state, input);
	case CU_JIT_INPUT_CUBIN:
	case CU_JIT_INPUT_FATBINARY: return add_image(state, input);
	case CU_JIT_INPUT_OBJECT:
	case CU_JIT_INPUT_LIBRARY: return add_embedded(state, input);
	case CU_JIT_INPUT_NVVM: return CUDA_ERROR_NOT_SUPPORTED; /* ended with CUDA 12 */
	}
	return CUDA_ERROR_INVALID_VALUE;
}

/* ---- entry points ------------------------------------------------------------------------------------------------------ */

CUresult cuLinkCreate_v2(unsigned int n_options, CUjit_option *options, void **values, CUlinkState *out)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && (n_options == 0 || (options && values)));
	sim_jit_options(n_options, options, values);
	CUlinkState state = sim_object_new(SIM_KIND_LINK, sizeof *state);
	if (!state)
		return CUDA_ERROR_OUT_OF_MEMORY;
	state->image.capability = context->device->hardware->compute_major * 10 + context->device->hardware->compute_minor;
	*out = state;
	return CUDA_SUCCESS;
}

CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t bytes, const char *name, unsigned int n_options,
			  CUjit_option *options, void **values)
{
	(void)name;
	SIM_TRY(check(state));
	SIM_REQUIRE(data && bytes && (n_options == 0 || (options && values)));
	return add(state, type, (struct sim_view){ data, bytes });
}

CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int n_options, CUjit_option *options,
			  void **values)
{
	void *input;
	uint64_t bytes;
	SIM_TRY(check(state));
	SIM_REQUIRE(path && (n_options == 0 || (options && values)));
	SIM_TRY(sim_module_read_file(path, &input, &bytes));
	CUresult result = add(state, type, (struct sim_view){ input, bytes });
	free(input);
	return result;
}

/* The cubin belongs to the state. */
CUresult cuLinkComplete(CUlinkState state, void **cubin, size_t *bytes)
{
	uint64_t length;
	SIM_TRY(check(state));
	SIM_REQUIRE(cubin);
	if (state->cubin)
		return CUDA_ERROR_INVALID_VALUE;
	SIM_TRY(sim_image_write(&state->image, &state->cubin, &length));
	*cubin = state->cubin;
	if (bytes)
		*bytes = length;
	return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state)
{
	SIM_TRY(check(state));
	sim_image_free(&state->image);
	free(state->cubin);
	sim_object_delete(state);
	return CUDA_SUCCESS;
}

/* ---- the same before CUDA 6.5 ------------------------------------------------------------------------------------------- */

CUresult cuLinkCreate(unsigned int n_options, CUjit_option *options, void **values, CUlinkState *out)
{
	return cuLinkCreate_v2(n_options, options, values, out);
}

CUresult cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t bytes, const char *name, unsigned int n_options,
		       CUjit_option *options, void **values)
{
	return cuLinkAddData_v2(state, type, data, bytes, name, n_options, options, values);
}

CUresult cuLinkAddFile(CUlinkState state, CUjitInputType type, const char *path, unsigned int n_options, CUjit_option *options,
		       void **values)
{
	return cuLinkAddFile_v2(state, type, path, n_options, options, values);
}
