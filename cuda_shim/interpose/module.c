/* SPDX-License-Identifier: Apache-2.0 */
/* Modules and libraries: loading, which may be refused and undone, and unloading. What they load later is in lazy.c. */
#include "interpose/code.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/image.h"
#include "interpose/outputs.h"
#include "interpose/relax.h"
#include "shim.h"

#define UNSURE_BYTES ((uint64_t)64 << 20) /* an image may hold code for many kinds of devices, and one of them is loaded */

enum load_form { MODULE_FILE, MODULE_DATA, MODULE_DATA_EX, MODULE_FAT_BINARY, LIBRARY_DATA, LIBRARY_FILE };

struct load_call {
	enum load_form form;
	void *made; /* CUmodule or CUlibrary */
	const void *image; /* or the path */
	CUjit_option *jit_options;
	void **jit_values;
	unsigned int jit_count;
	CUlibraryOption *options;
	void **values;
	unsigned int count;
};

/* ---- loading --------------------------------------------------------------------------------------------------- */

static CUresult load(struct load_call *c)
{
	CUmodule *module = (CUmodule *)(void *)&c->made;
	CUlibrary *library = (CUlibrary *)(void *)&c->made;

	switch (c->form) {
	case MODULE_FILE: return aq_cuda.cuModuleLoad(module, c->image);
	case MODULE_DATA: return aq_cuda.cuModuleLoadData(module, c->image);
	case MODULE_DATA_EX: return aq_cuda.cuModuleLoadDataEx(module, c->image, c->jit_count, c->jit_options, c->jit_values);
	case MODULE_FAT_BINARY: return aq_cuda.cuModuleLoadFatBinary(module, c->image);
	case LIBRARY_DATA:
		return aq_cuda.cuLibraryLoadData(library, c->image, c->jit_options, c->jit_values, c->jit_count, c->options, c->values,
						 c->count);
	default:
		return aq_cuda.cuLibraryLoadFromFile(library, c->image, c->jit_options, c->jit_values, c->jit_count, c->options, c->values,
						     c->count);
	}
}

static bool unload(const struct load_call *c)
{
	CUstreamCaptureMode mode = aq_relax();
	bool is_library = c->form == LIBRARY_DATA || c->form == LIBRARY_FILE;
	CUresult result = is_library ? aq_cuda.cuLibraryUnload(c->made) : aq_cuda.cuModuleUnload(c->made);

	aq_restrict(mode);
	return result == CUDA_SUCCESS;
}

/* Is there no room for even the smallest module? */
static bool is_full(int device)
{
	if (!aq_account_full(device))
		return false;
	aq_reclaim(device);
	return aq_account_full(device);
}

/* The values of a compiler's options that it writes, and the logs they point to. False when there is no memory to keep them. */
static bool keep_jit_outputs(struct aq_outputs *outputs, const struct load_call *call)
{
	void *logs[2] = { NULL };
	size_t bytes[2] = { 0 };

	if (!call->jit_options || !call->jit_values)
		return true;
	for (unsigned int i = 0; i < call->jit_count; i++) {
		switch ((int)call->jit_options[i]) {
		case CU_JIT_INFO_LOG_BUFFER: logs[0] = call->jit_values[i]; break;
		case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: bytes[0] = (uint32_t)(uintptr_t)call->jit_values[i]; break;
		case CU_JIT_ERROR_LOG_BUFFER: logs[1] = call->jit_values[i]; break;
		case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: bytes[1] = (uint32_t)(uintptr_t)call->jit_values[i]; break;
		default: break;
		}
	}
	return aq_outputs_keep(outputs, call->jit_values, call->jit_count * sizeof(*call->jit_values)) &&
	       aq_outputs_keep(outputs, logs[0], bytes[0]) && aq_outputs_keep(outputs, logs[1], bytes[1]);
}

static uint64_t image_bytes(const struct load_call *call)
{
	bool is_file = call->form == MODULE_FILE || call->form == LIBRARY_FILE;
	uint64_t bytes = is_file ? aq_image_file_bytes(call->image) : aq_image_bytes(call->image);

	return bytes < UNSURE_BYTES ? bytes : UNSURE_BYTES;
}

/* Unload, and uncharge. What the driver does not unload stays charged, with what else it may have taken. */
static bool undo(const struct load_call *call, const struct aq_place *place, uint64_t charged, uint64_t doubt)
{
	bool unloaded = unload(call);

	if (unloaded) {
		aq_code_give_back(place, charged);
	} else {
		aq_charge_taken(place->device, AQ_MODULE, doubt);
		aq_code_hold((uintptr_t)call->made, place, charged + doubt);
	}
	return unloaded;
}

/* The driver does not say which process took much more than the image shows. What comes back when the module is unloaded was its own: that
 * is charged before it is loaded again. */
static bool load_again(struct load_call *call, const struct aq_place *place, const struct aq_code_growth *growth)
{
	struct aq_moment loaded, unloaded;

	bool known = aq_code_look(place->device, &loaded) == CUDA_SUCCESS;
	if (!undo(call, place, growth->bytes, growth->doubt_bytes) || !known || aq_code_look(place->device, &unloaded) != CUDA_SUCCESS)
		return false;
	uint64_t back = unloaded.free_bytes > loaded.free_bytes ? unloaded.free_bytes - loaded.free_bytes : 0;
	uint64_t most = growth->bytes + growth->doubt_bytes, own = back < most ? back : most;
	own = own > growth->bytes ? own : growth->bytes;
	if (!aq_charge(place->device, AQ_MODULE, own))
		return false;
	if (load(call) != CUDA_SUCCESS) {
		aq_uncharge(place->device, AQ_MODULE, own);
		return false;
	}
	if (aq_code_hold((uintptr_t)call->made, place, own))
		return true;
	undo(call, place, own, 0);
	return false;
}

/* Charge what a load took, and remember it. False when it was unloaded again, because it does not fit or cannot be measured; what the
 * driver does not unload stays charged, past the limit. */
static bool settle(struct load_call *call, const struct aq_place *place, const struct aq_moment *before)
{
	struct aq_code_growth growth;
	enum aq_code_fit fit = aq_code_charge(image_bytes(call), place->device, before, &growth);

	if (fit == AQ_CODE_FITS && growth.doubt_bytes > UNSURE_BYTES)
		return load_again(call, place, &growth);
	if (fit == AQ_CODE_FITS && aq_code_hold((uintptr_t)call->made, place, growth.bytes))
		return true;
	undo(call, place, growth.bytes, 0);
	return false;
}

/* Load, when there may be room: what the module takes shows only then. */
static CUresult load_and_measure(struct load_call *call, const struct aq_place *place, const struct aq_moment *before)
{
	struct aq_outputs outputs = { 0 };
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	aq_code_learn_baseline(place->device);
	if (keep_jit_outputs(&outputs, call))
		result = load(call);
	if (result == CUDA_SUCCESS && !settle(call, place, before)) {
		aq_outputs_put_back(&outputs);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	aq_outputs_forget(&outputs);
	return result;
}

static CUresult load_charged(void **handle, struct load_call *call)
{
	bool is_library = call->form == LIBRARY_DATA || call->form == LIBRARY_FILE;
	struct aq_place place;
	struct aq_moment before;

	if (!handle)
		return CUDA_ERROR_INVALID_VALUE; /* as from the driver */
	CUresult result = aq_find_place(&place);
	if (is_library && result == CUDA_ERROR_INVALID_CONTEXT && aq_context_is_absent()) {
		result = load(call); /* it takes no memory yet */
		if (result == CUDA_SUCCESS)
			*handle = call->made;
		return result;
	}
	if (result == CUDA_SUCCESS)
		result = aq_code_look(place.device, &before);
	if (result != CUDA_SUCCESS)
		return result;
	if (place.device < 0 || is_full(place.device)) {
		aq_refused(place.device, 0);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	result = load_and_measure(call, &place, &before);
	if (result == CUDA_SUCCESS)
		*handle = call->made;
	return result;
}

CUresult cuModuleLoad(CUmodule *module, const char *path)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoad(module, path));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_FILE, .image = path });
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoadData(module, image));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_DATA, .image = image });
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoadDataEx(module, image, count, options, values));
	return load_charged((void **)module,
			    &(struct load_call){
				.form = MODULE_DATA_EX, .image = image, .jit_count = count, .jit_options = options, .jit_values = values });
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	AQ_LIMITED_OR_RETURN(cuModuleLoadFatBinary(module, image));
	return load_charged((void **)module, &(struct load_call){ .form = MODULE_FAT_BINARY, .image = image });
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
			   CUlibraryOption *options, void **values, unsigned int count)
{
	AQ_LIMITED_OR_RETURN(cuLibraryLoadData(library, code, jit_options, jit_values, jit_count, options, values, count));
	return load_charged((void **)library, &(struct load_call){ .form = LIBRARY_DATA,
								   .image = code,
								   .jit_options = jit_options,
								   .jit_values = jit_values,
								   .jit_count = jit_count,
								   .options = options,
								   .values = values,
								   .count = count });
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *jit_options, void **jit_values, unsigned int jit_count,
			       CUlibraryOption *options, void **values, unsigned int count)
{
	AQ_LIMITED_OR_RETURN(cuLibraryLoadFromFile(library, path, jit_options, jit_values, jit_count, options, values, count));
	return load_charged((void **)library, &(struct load_call){ .form = LIBRARY_FILE,
								   .image = path,
								   .jit_options = jit_options,
								   .jit_values = jit_values,
								   .jit_count = jit_count,
								   .options = options,
								   .values = values,
								   .count = count });
}

/* ---- unloading ------------------------------------------------------------------------------------------------- */

#define UNLOAD_HOOK(name, handle_type)                                        \
	CUresult name(handle_type handle)                                     \
	{                                                                     \
		struct aq_code_held held;                                     \
		AQ_LIMITED_OR_RETURN(name(handle));                           \
		aq_code_unloading((uintptr_t)handle, &held);                  \
		CUresult result = aq_cuda.name(handle);                       \
		aq_code_unloaded(&held, result == CUDA_SUCCESS);              \
		return result;                                                \
	}

UNLOAD_HOOK(cuModuleUnload, CUmodule)
UNLOAD_HOOK(cuLibraryUnload, CUlibrary)
