/* SPDX-License-Identifier: Apache-2.0 */
/* What modules and libraries load later, when a program first asks for a function or a variable; and the stacks that a function will need.
 *
 * The driver gives no way to take back what such a call loaded, but by unloading the program's module. So the call is measured, and what
 * does not fit is charged at once, past the limit: the program gets CUDA_ERROR_OUT_OF_MEMORY instead of the address, here and at each
 * further such call for that module until the container is within its limit again, and nothing more is granted meanwhile. The agent's
 * audit finds it. */
#include "interpose/lazy.h"

#include <string.h>

#include "account/map.h"
#include "interpose/code.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "shim.h"

/* Modules and libraries that did not fit completely. */
static struct aq_map refused;
static _Atomic unsigned refused_count;

/* A variable that the driver writes for the program: a call that is refused leaves it as it was. */
struct output {
	void *at;
	size_t bytes;
	uint64_t was;
};

struct lazy_call {
	uint64_t handle; /* what it is unloaded with */
	struct output outputs[2];
	struct aq_place place;
	struct aq_moment before;
};

#define OUTPUT(pointer) { .at = (pointer), .bytes = sizeof(*(pointer)) }

static CUresult begin(struct lazy_call *call)
{
	struct aq_entry entry;
	CUresult result = aq_find_place(&call->place);

	if (result != CUDA_SUCCESS)
		return result;
	bool is_refused = atomic_load_explicit(&refused_count, memory_order_relaxed) && aq_account_over(call->place.device) &&
			  aq_map_get(&refused, call->handle, &entry);
	if (call->place.device < 0 || is_refused)
		return CUDA_ERROR_OUT_OF_MEMORY;
	aq_code_learn_baseline(call->place.device);
	for (unsigned i = 0; i < 2; i++)
		if (call->outputs[i].at)
			memcpy(&call->outputs[i].was, call->outputs[i].at, call->outputs[i].bytes);
	return aq_code_look(call->place.device, &call->before);
}

static void restore(const struct lazy_call *call)
{
	for (unsigned i = 0; i < 2; i++)
		if (call->outputs[i].at)
			memcpy(call->outputs[i].at, &call->outputs[i].was, call->outputs[i].bytes);
}

static void refuse(const struct lazy_call *call)
{
	struct aq_entry entry = { .key = call->handle };

	if (call->handle && aq_map_put(&refused, &entry))
		atomic_store_explicit(&refused_count, 1, memory_order_relaxed);
	restore(call);
}

/* Also after an error: part of it may be loaded. */
static CUresult end(const struct lazy_call *call, CUresult result)
{
	struct aq_code_growth growth;
	enum aq_code_fit fit = aq_code_charge(AQ_NO_IMAGE, call->place.device, &call->before, &growth);

	aq_code_hold(call->handle, &call->place, growth.bytes); /* without memory to record it, charged until the process ends */
	if (result != CUDA_SUCCESS || fit == AQ_CODE_FITS)
		return result;
	refuse(call);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The library of a kernel, or the module of a function: what it is unloaded with. Where the driver does not report it, the handle itself:
 * the code is then charged until its context ends. */
static uint64_t library_of(CUkernel kernel)
{
	CUlibrary library = NULL;

	return aq_cuda.cuKernelGetLibrary(&library, kernel) == CUDA_SUCCESS ? (uintptr_t)library : (uintptr_t)kernel;
}

static uint64_t module_of(CUfunction function)
{
	CUmodule module = NULL;

	return aq_cuda.cuFuncGetModule(&module, function) == CUDA_SUCCESS ? (uintptr_t)module : (uintptr_t)function;
}

/* Add what the function will need of the context's stacks when it is launched. */
static CUresult look_at_stack(CUfunction function, uint64_t *local_bytes)
{
	int bytes = 0;
	CUresult result = aq_cuda.cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function);

	if (result == CUDA_SUCCESS && bytes > 0 && (uint64_t)bytes > *local_bytes)
		*local_bytes = (uint64_t)bytes;
	return result;
}

/* The end of a call that gives out a function. */
static CUresult end_with(const struct lazy_call *call, CUresult result, const CUfunction *function)
{
	uint64_t local_bytes = 0;

	result = end(call, result);
	if (result == CUDA_SUCCESS && function)
		result = look_at_stack(*function, &local_bytes);
	if (result == CUDA_SUCCESS)
		result = aq_context_reserve_stack(&call->place, local_bytes);
	if (result != CUDA_SUCCESS)
		restore(call);
	return result;
}

#define LAZY_CALL(call_, handle_, ...)                                                              \
	do {                                                                                        \
		AQ_LIMITED_OR_RETURN(call_);                                                        \
		struct lazy_call lazy = { .handle = (handle_), .outputs = { __VA_ARGS__ } };        \
		CUresult result = begin(&lazy);                                                     \
		return result == CUDA_SUCCESS ? end(&lazy, aq_cuda.call_) : result;                 \
	} while (0)

#define LAZY_FUNCTION(call_, handle_, function_, ...)                                               \
	do {                                                                                        \
		AQ_LIMITED_OR_RETURN(call_);                                                        \
		struct lazy_call lazy = { .handle = (handle_), .outputs = { __VA_ARGS__ } };        \
		CUresult result = begin(&lazy);                                                     \
		return result == CUDA_SUCCESS ? end_with(&lazy, aq_cuda.call_, function_) : result; \
	} while (0)

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	LAZY_FUNCTION(cuModuleGetFunction(function, module, name), (uintptr_t)module, function, OUTPUT(function));
}

CUresult cuModuleGetGlobal(CUdeviceptr_v1 *address, unsigned int *bytes, CUmodule module, const char *name)
{
	LAZY_CALL(cuModuleGetGlobal(address, bytes, module, name), (uintptr_t)module, OUTPUT(address), OUTPUT(bytes));
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
	LAZY_CALL(cuModuleGetGlobal_v2(address, bytes, module, name), (uintptr_t)module, OUTPUT(address), OUTPUT(bytes));
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
	LAZY_CALL(cuLibraryGetModule(module, library), (uintptr_t)library, OUTPUT(module));
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
	LAZY_CALL(cuLibraryGetGlobal(address, bytes, library, name), (uintptr_t)library, OUTPUT(address), OUTPUT(bytes));
}

CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
	LAZY_CALL(cuLibraryGetManaged(address, bytes, library, name), (uintptr_t)library, OUTPUT(address), OUTPUT(bytes));
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
	LAZY_FUNCTION(cuKernelGetFunction(function, kernel), library_of(kernel), function, OUTPUT(function));
}

CUresult cuFuncLoad(CUfunction function)
{
	LAZY_FUNCTION(cuFuncLoad(function), module_of(function), &function, { .at = NULL });
}

/* Load kernels into the current context, if there is one. A program may launch the handle that a library gives out, and CUDA would load
 * the kernel then, where its memory cannot be given back. Without a current context that is what happens, and the agent finds it. A kernel
 * that the driver cannot load fails at its launch, as without the shim. */
static CUresult load_kernels(CUlibrary library, const CUkernel *kernels, unsigned count)
{
	struct lazy_call lazy = { .handle = (uintptr_t)library };
	CUcontext context = NULL;
	CUfunction function;

	if (aq_cuda.cuCtxGetCurrent(&context) == CUDA_SUCCESS && !context)
		return CUDA_SUCCESS;
	CUresult result = begin(&lazy), looked = CUDA_SUCCESS;
	uint64_t local_bytes = 0;
	if (result != CUDA_SUCCESS)
		return result;
	for (unsigned i = 0; i < count && looked == CUDA_SUCCESS; i++)
		if (kernels[i] && aq_cuda.cuKernelGetFunction(&function, kernels[i]) == CUDA_SUCCESS)
			looked = look_at_stack(function, &local_bytes);
	result = end(&lazy, looked); /* stacks are charged after the growth of code is known */
	return result == CUDA_SUCCESS ? aq_context_reserve_stack(&lazy.place, local_bytes) : result;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
	CUkernel found = NULL;

	AQ_LIMITED_OR_RETURN(cuLibraryGetKernel(kernel, library, name));
	if (!kernel)
		return aq_cuda.cuLibraryGetKernel(kernel, library, name);
	CUresult result = aq_cuda.cuLibraryGetKernel(&found, library, name);
	if (result == CUDA_SUCCESS)
		result = load_kernels(library, &found, 1);
	if (result == CUDA_SUCCESS)
		*kernel = found;
	return result;
}

/* The handles are the program's array, which is not kept from it: a refused call has still filled it. */
CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary library)
{
	AQ_LIMITED_OR_RETURN(cuLibraryEnumerateKernels(kernels, count, library));
	if (kernels && count)
		memset(kernels, 0, count * sizeof *kernels); /* there may be fewer kernels than `count` */
	CUresult result = aq_cuda.cuLibraryEnumerateKernels(kernels, count, library);
	return result == CUDA_SUCCESS && kernels ? load_kernels(library, kernels, count) : result;
}

/* As above. */
CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int count, CUmodule module)
{
	AQ_LIMITED_OR_RETURN(cuModuleEnumerateFunctions(functions, count, module));
	struct lazy_call lazy = { .handle = (uintptr_t)module };
	CUresult result = begin(&lazy);
	uint64_t local_bytes = 0;

	if (result != CUDA_SUCCESS)
		return result;
	if (functions && count)
		memset(functions, 0, count * sizeof *functions); /* there may be fewer functions than `count` */
	result = end(&lazy, aq_cuda.cuModuleEnumerateFunctions(functions, count, module));
	for (unsigned i = 0; result == CUDA_SUCCESS && functions && i < count; i++)
		if (functions[i])
			result = look_at_stack(functions[i], &local_bytes);
	return result == CUDA_SUCCESS ? aq_context_reserve_stack(&lazy.place, local_bytes) : result;
}

CUresult cuLibraryGetUnifiedFunction(void **function, CUlibrary library, const char *symbol)
{
	LAZY_CALL(cuLibraryGetUnifiedFunction(function, library, symbol), (uintptr_t)library, OUTPUT(function));
}

void aq_lazy_forget(void)
{
	aq_map_forget(&refused);
	atomic_store(&refused_count, 0);
}
