/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_module.c - modules: images with code and variables in the memory of a context. Libraries, which come into a context when they are
 * first used there, are in cuda_library.c.
 *
 * A kernel called aliquot_spin takes its duration in microseconds as its first parameter (64 bits). Others without a duration take as long
 * as their grid is large (cuda_launch.c). In an image that cannot be read because a library is missing, any name is a kernel.
 *
 * Lock order: sim_context_lock, then modules_lock, then memory locks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

#define SHARED_SEGMENT_BYTES (UINT64_C(1) << 20) /* smaller variables lie where other memory was before */

static pthread_mutex_t modules_lock = PTHREAD_MUTEX_INITIALIZER; /* instances of all modules, functions of open ones */

/* ---- functions --------------------------------------------------------------------------------------------------------- */

CUfunction sim_module_find(CUmodule module, const char *name)
{
	for (CUfunction function = module->functions; function; function = function->next)
		if (strcmp(function->kernel->name, name) == 0)
			return function;
	return NULL;
}

static CUfunction add_function(CUmodule module, const struct sim_image_kernel *kernel)
{
	CUfunction function = sim_object_new(SIM_KIND_FUNCTION, sizeof *function);
	if (!function)
		return NULL;
	function->module = module;
	function->kernel = kernel;
	function->spins = strcmp(kernel->name, "aliquot_spin") == 0;
	function->cluster_must_be_set = kernel->needs_cluster && !kernel->cluster[0];
	memcpy(function->cluster, kernel->cluster, sizeof function->cluster);
	function->block[0] = function->block[1] = function->block[2] = 1;
	*(module->last_function ? &module->last_function->next : &module->functions) = function;
	module->last_function = function;
	module->n_functions++;
	return function;
}

/* A kernel of an open image is known by its name only. */
static CUfunction add_any(CUmodule module, const char *name)
{
	struct sim_image_kernel *kernel = calloc(1, sizeof *kernel);
	CUfunction function = kernel && (kernel->name = strdup(name)) ? add_function(module, kernel) : NULL;
	if (!function && kernel) {
		free(kernel->name);
		free(kernel);
	}
	return function;
}

CUresult sim_module_function(CUmodule module, const char *name, CUfunction *out)
{
	CUfunction function;
	if (!module->image.is_open) {
		function = sim_module_find(module, name);
	} else {
		pthread_mutex_lock(&modules_lock);
		function = sim_module_find(module, name);
		function = function ? function : add_any(module, name);
		pthread_mutex_unlock(&modules_lock);
	}
	if (!function)
		return module->image.is_open ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_NOT_FOUND;
	*out = function;
	return CUDA_SUCCESS;
}

static void delete_functions(CUmodule module)
{
	while (module->functions) {
		CUfunction function = module->functions;
		module->functions = function->next;
		if (module->image.is_open) {
			free(function->kernel->name);
			free((void *)(uintptr_t)function->kernel);
		}
		sim_object_delete(function);
	}
}

/* ---- memory ------------------------------------------------------------------------------------------------------------ */

static void free_memory(CUmodule module, struct sim_instance *instance)
{
	for (uint32_t i = 0; i < module->image.n_blocks; i++) {
		if (instance->blocks[i])
			sim_memory_free(instance->blocks[i]);
		instance->blocks[i] = 0;
	}
	if (instance->code)
		sim_memory_free(instance->code);
	instance->code = 0;
}

/* First values; the rest of a small block is set to zero, a large one comes as zeros. */
static void initialise(const struct sim_image_block *block, CUdeviceptr address, const struct sim_device *device)
{
	bool is_small = block->bytes <= SHARED_SEGMENT_BYTES;
	uint64_t touched = is_small ? block->bytes : block->initial_bytes;
	uint8_t *bytes = touched ? sim_memory_bytes(address, touched, device) : NULL;
	if (!bytes)
		return;
	if (block->initial_bytes)
		memcpy(bytes, block->initial, block->initial_bytes);
	memset(bytes + block->initial_bytes, 0, touched - block->initial_bytes);
}

static CUresult allocate_managed(CUmodule module, uint32_t i, struct sim_device *device)
{
	if (module->managed[i])
		return CUDA_SUCCESS;
	SIM_TRY(sim_memory_allocate_managed(device, NULL, module->image.blocks[i].bytes, &module->managed[i]));
	initialise(&module->image.blocks[i], module->managed[i], device);
	return CUDA_SUCCESS;
}

static CUresult allocate_block(CUmodule module, struct sim_instance *instance, uint32_t i, struct sim_device *device)
{
	const struct sim_image_block *block = &module->image.blocks[i];
	if (block->is_managed)
		return allocate_managed(module, i, device);
	SIM_TRY(sim_memory_allocate(device, NULL, block->bytes, &instance->blocks[i]));
	initialise(block, instance->blocks[i], device);
	return CUDA_SUCCESS;
}

static CUresult allocate_all(CUmodule module, struct sim_instance *instance, struct sim_device *device)
{
	CUresult result = CUDA_SUCCESS;
	if (module->image.code_bytes)
		result = sim_memory_allocate(device, NULL, module->image.code_bytes, &instance->code);
	for (uint32_t i = 0; i < module->image.n_blocks && result == CUDA_SUCCESS; i++)
		result = allocate_block(module, instance, i, device);
	if (result != CUDA_SUCCESS)
		free_memory(module, instance);
	return result;
}

static struct sim_instance *instance_of(CUmodule module, CUcontext context)
{
	struct sim_instance *instance = atomic_load_explicit(&module->instances, memory_order_acquire);
	while (instance && atomic_load_explicit(&instance->context, memory_order_acquire) != context)
		instance = instance->next;
	return instance;
}

/* One that no context uses, perhaps a new one. */
static struct sim_instance *free_instance(CUmodule module)
{
	struct sim_instance *instance = instance_of(module, NULL);
	if (instance)
		return instance;
	instance = calloc(1, sizeof *instance);
	if (instance && !(instance->blocks = calloc(module->image.n_blocks + 1, sizeof *instance->blocks))) {
		free(instance);
		instance = NULL;
	}
	if (instance) {
		instance->next = atomic_load_explicit(&module->instances, memory_order_relaxed);
		atomic_store_explicit(&module->instances, instance, memory_order_release);
	}
	return instance;
}

bool sim_module_is_loaded(CUmodule module, CUcontext context)
{
	return instance_of(module, context) != NULL;
}

CUresult sim_module_load(CUmodule module, CUcontext context)
{
	if (sim_likely(instance_of(module, context) != NULL))
		return CUDA_SUCCESS;
	SIM_TRY(sim_context_provide(context, &module->image));
	CUresult result = CUDA_SUCCESS;
	pthread_mutex_lock(&modules_lock);
	if (!instance_of(module, context)) {
		struct sim_instance *instance = free_instance(module);
		result = instance ? allocate_all(module, instance, context->device) : CUDA_ERROR_OUT_OF_MEMORY;
		if (result == CUDA_SUCCESS)
			atomic_store_explicit(&instance->context, context, memory_order_release);
	}
	pthread_mutex_unlock(&modules_lock);
	return result;
}

static void leave(CUmodule module, CUcontext context)
{
	struct sim_instance *instance = instance_of(module, context);
	if (!instance)
		return;
	free_memory(module, instance);
	atomic_store_explicit(&instance->context, NULL, memory_order_release);
}

CUresult sim_module_variable(CUmodule module, CUcontext context, const char *name, CUdeviceptr *address, size_t *bytes)
{
	const struct sim_image *image = &module->image;
	for (uint32_t i = 0; i < image->n_variables; i++) {
		const struct sim_image_variable *variable = &image->variables[i];
		if (strcmp(variable->name, name) != 0)
			continue;
		SIM_TRY(sim_module_load(module, context));
		const struct sim_instance *instance = instance_of(module, context);
		bool is_managed = image->blocks[variable->block].is_managed;
		if (address)
			*address = (is_managed ? module->managed : instance->blocks)[variable->block] + variable->offset;
		if (bytes)
			*bytes = variable->bytes;
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_NOT_FOUND;
}

/* ---- making and ending ------------------------------------------------------------------------------------------------- */

static CUmodule libraries; /* under modules_lock */

void sim_libraries_leave(CUcontext context)
{
	pthread_mutex_lock(&modules_lock);
	for (CUmodule library = libraries; library; library = library->next)
		leave(library, context);
	pthread_mutex_unlock(&modules_lock);
}

static void unlist_library(CUmodule module)
{
	pthread_mutex_lock(&modules_lock);
	for (CUmodule *at = &libraries; *at; at = &(*at)->next)
		if (*at == module) {
			*at = module->next;
			break;
		}
	pthread_mutex_unlock(&modules_lock);
}

void sim_library_list(CUmodule module)
{
	pthread_mutex_lock(&modules_lock);
	module->is_library = true;
	module->next = libraries;
	libraries = module;
	pthread_mutex_unlock(&modules_lock);
}

void sim_module_delete(CUmodule module)
{
	if (module->is_library)
		unlist_library(module);
	delete_functions(module);
	struct sim_instance *instance = atomic_load(&module->instances), *next;
	for (; instance; instance = next) {
		next = instance->next;
		free_memory(module, instance);
		free(instance->blocks);
		free(instance);
	}
	for (uint32_t i = 0; module->managed && i < module->image.n_blocks; i++)
		if (module->managed[i])
			sim_memory_free(module->managed[i]);
	free(module->managed);
	sim_image_free(&module->image);
	sim_object_delete(module);
}

/* Entries are chosen for the current context's device; without one, for the first device. */
static uint32_t capability(void)
{
	const struct sim_device *device = sim_thread.current ? sim_thread.current->device : &sim_cuda.devices[0];
	return device->hardware->compute_major * 10 + device->hardware->compute_minor;
}

static CUresult fill(CUmodule module, struct sim_view image)
{
	SIM_TRY(sim_image_read(image, capability(), &module->image));
	module->managed = calloc(module->image.n_blocks + 1, sizeof *module->managed);
	if (!module->managed)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (uint32_t i = 0; i < module->image.n_kernels; i++)
		if (!add_function(module, &module->image.kernels[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	return CUDA_SUCCESS;
}

CUresult sim_module_new(const void *image, uint64_t bytes, CUmodule *out)
{
	struct sim_view view = { image, bytes };
	SIM_REQUIRE(image);
	if (!bytes)
		SIM_TRY(sim_image_locate(image, &view));
	CUmodule module = sim_object_new(SIM_KIND_MODULE, sizeof *module);
	if (!module)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = fill(module, view);
	if (result == CUDA_SUCCESS)
		*out = module;
	else
		sim_module_delete(module);
	return result;
}

static CUresult load(CUmodule *out, const void *image, uint64_t bytes)
{
	CUcontext context;
	CUmodule module;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out);
	SIM_TRY(sim_module_new(image, bytes, &module));
	module->context = context;
	CUresult result = sim_module_load(module, context);
	if (result != CUDA_SUCCESS) {
		sim_module_delete(module);
		return result;
	}
	pthread_mutex_lock(&sim_context_lock);
	module->next = context->modules;
	context->modules = module;
	pthread_mutex_unlock(&sim_context_lock);
	*out = module;
	return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
	return load(out, image, 0);
}

/* The options tune a compiler that is not here: it took no time and has no log. */
void sim_jit_options(unsigned int n_options, const CUjit_option *options, void **values)
{
	for (unsigned int i = 0; i < n_options; i++) {
		if ((options[i] == CU_JIT_INFO_LOG_BUFFER || options[i] == CU_JIT_ERROR_LOG_BUFFER) && values[i])
			*(char *)values[i] = '\0';
		if (options[i] == CU_JIT_WALL_TIME || options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES ||
		    options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
			values[i] = NULL;
	}
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int n_options, CUjit_option *options, void **values)
{
	SIM_REQUIRE(n_options == 0 || (options && values));
	sim_jit_options(n_options, options, values);
	return cuModuleLoadData(out, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image)
{
	return cuModuleLoadData(out, image);
}

static bool read_all(int fd, uint8_t *at, uint64_t length)
{
	while (length) {
		ssize_t got = read(fd, at, length);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		at += got;
		length -= (uint64_t)got;
	}
	return true;
}

CUresult sim_module_read_file(const char *path, void **image, uint64_t *bytes)
{
	struct stat status;
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	CUresult result = CUDA_ERROR_FILE_NOT_FOUND;
	*image = NULL;
	if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size <= (off_t)SIM_IMAGE_MAX_BYTES) {
		*bytes = (uint64_t)status.st_size;
		*image = malloc(*bytes + 1);
		result = *image && read_all(fd, *image, *bytes) ? CUDA_SUCCESS : result;
	}
	close(fd);
	if (result == CUDA_SUCCESS && *bytes == 0)
		result = CUDA_ERROR_INVALID_IMAGE;
	if (result != CUDA_SUCCESS)
		free(*image);
	return result;
}

CUresult cuModuleLoad(CUmodule *out, const char *path)
{
	CUcontext context;
	void *image;
	uint64_t bytes;
	SIM_TRY(sim_current(&context));
	SIM_TRY(sim_module_read_file(path, &image, &bytes));
	CUresult result = load(out, image, bytes);
	free(image);
	return result;
}

static bool is_module(CUmodule module)
{
	return sim_is(module, SIM_KIND_MODULE);
}

CUresult cuModuleUnload(CUmodule module)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	if (!is_module(module) || module->is_library)
		return CUDA_ERROR_INVALID_HANDLE;
	SIM_TRY(sim_capture_unsafe_call());
	sim_engine_wait_context(module->context);
	pthread_mutex_lock(&sim_context_lock);
	for (CUmodule *at = &module->context->modules; *at; at = &(*at)->next)
		if (*at == module) {
			*at = module->next;
			break;
		}
	pthread_mutex_unlock(&sim_context_lock);
	sim_module_delete(module);
	return CUDA_SUCCESS;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(mode);
	*mode = CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(out && name);
	if (!is_module(module))
		return CUDA_ERROR_INVALID_HANDLE;
	return sim_module_function(module, name, out);
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule module)
{
	SIM_REQUIRE_READY();
	SIM_REQUIRE(count);
	if (!is_module(module))
		return CUDA_ERROR_INVALID_HANDLE;
	*count = module->n_functions;
	return CUDA_SUCCESS;
}

void sim_module_list(CUmodule module, CUfunction *functions, unsigned count)
{
	CUfunction function = module->functions;
	for (unsigned i = 0; i < count && function; i++, function = function->next)
		functions[i] = function;
}

/* The functions of a library's module are loaded into the current context. */
CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int count, CUmodule module)
{
	CUcontext context;
	SIM_REQUIRE_READY();
	SIM_REQUIRE(functions || count == 0);
	if (!is_module(module))
		return CUDA_ERROR_INVALID_HANDLE;
	if (module->is_library) {
		SIM_TRY(sim_current(&context));
		SIM_TRY(sim_module_load(module, context));
	}
	sim_module_list(module, functions, count);
	return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
	CUcontext context;
	SIM_TRY(sim_current(&context));
	SIM_REQUIRE(name);
	if (!is_module(module))
		return CUDA_ERROR_INVALID_HANDLE;
	return sim_module_variable(module, module->is_library ? context : module->context, name, address, bytes);
}
