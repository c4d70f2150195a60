/*
 * cuda_module.c - modules, libraries, functions and what one can ask about them.
 *
 * A module image is text. What counts in it:
 *     .entry NAME                                      a kernel (PTX as compilers write it will do; the body is not looked at)
 *     .global ... NAME[BYTES];   .global .u64 NAME;    a global variable
 *     // aliquot-sim: NAME duration_us=NUMBER          how long one launch of NAME takes, alone on the whole GPU
 * A kernel called aliquot_spin takes its duration in microseconds as its first parameter (64 bits). Others without a duration take as long as
 * their grid is large (cuda_launch.c). Binary images are refused: no binary for this GPU (209). Text without a kernel or variable: invalid PTX (218).
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim/cuda_internal.h"

#define ANNOTATION "aliquot-sim:"
#define MAX_IMAGE_BYTES (64u << 20)

/* ---- reading the text ------------------------------------------------------------------------------------------------ */

static bool is_name_char(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%'; }

static const char *skip_blanks(const char *at)
{
    while (*at == ' ' || *at == '\t')
        at++;
    return at;
}

static char *copy_name(const char *at, const char **end)
{
    const char *start = at;
    while (is_name_char(*at))
        at++;
    *end = at;
    return at > start ? strndup(start, (size_t)(at - start)) : NULL;
}

/* The place behind `word` when the line contains it as a word of its own. */
static const char *after_word(const char *line, const char *end, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = line; at + length <= end; at++)
        if (memcmp(at, word, length) == 0 && !is_name_char(at[length]) && (at == line || !is_name_char(at[-1])))
            return at + length;
    return NULL;
}

static CUfunction find_function(CUmodule module, const char *name)
{
    for (CUfunction function = module->functions; function; function = function->next)
        if (strcmp(function->name, name) == 0)
            return function;
    return NULL;
}

static bool add_function(CUmodule module, const char *at)
{
    const char *end;
    char *name = copy_name(skip_blanks(at), &end);
    if (!name)
        return true;    /* the word stood in a comment */
    CUfunction function = find_function(module, name) ? NULL : sim_object_new(SIM_KIND_FUNCTION, sizeof *function);
    if (!function) {
        free(name);
        return true;
    }
    function->module = module;
    function->name = name;
    function->spins = strcmp(name, "aliquot_spin") == 0;
    function->block[0] = function->block[1] = function->block[2] = 1;
    CUfunction *last = &module->functions;
    while (*last)
        last = &(*last)->next;
    *last = function;
    module->n_functions++;
    return true;
}

static uint64_t type_bytes(const char *word, size_t length)
{
    /* ".b8", ".u64", ".f32": the number of bits ends the word */
    unsigned bits = 0;
    for (size_t i = 2; i < length; i++)
        bits = isdigit((unsigned char)word[i]) ? bits * 10 + (unsigned)(word[i] - '0') : 0;
    return strchr("busf", word[1]) && (bits == 8 || bits == 16 || bits == 32 || bits == 64) ? bits / 8 : 0;
}

/* ".align 4 .b8 buffer[1024];" after ".global": type words begin with a dot, the name does not. */
static bool add_global(CUmodule module, const char *at, const char *line_end)
{
    uint64_t element = 1, count = 1;
    const char *end = at;
    char *name = NULL;
    while (at < line_end && !name) {
        at = skip_blanks(at);
        if (*at == '.') {
            const char *word = at++;
            while (is_name_char(*at))
                at++;
            uint64_t bytes = type_bytes(word, (size_t)(at - word));
            element = bytes ? bytes : element;
        } else if (isdigit((unsigned char)*at)) {
            strtoul(at, (char **)&at, 10);      /* the number after .align */
        } else if (is_name_char(*at)) {
            name = copy_name(at, &end);
        } else {
            return true;
        }
    }
    if (!name)
        return true;
    if (*end == '[')
        count = strtoull(end + 1, NULL, 10);
    struct sim_global *global = calloc(1, sizeof *global);
    if (!global) {
        free(name);
        return false;
    }
    global->name = name;
    global->bytes = element * (count ? count : 1);
    global->next = module->globals;
    module->globals = global;
    return true;
}

static void annotate(CUmodule module, const char *at)
{
    double microseconds;
    char name[256];
    if (sscanf(at, " %255s duration_us=%lf", name, &microseconds) != 2 || microseconds < 0)
        return;
    CUfunction function = find_function(module, name);
    if (function)
        function->duration_ns = (uint64_t)(microseconds * 1000) + 1;    /* 0 would mean: by grid size */
}

static bool read_line(CUmodule module, const char *line, const char *end)
{
    const char *comment = memmem(line, (size_t)(end - line), "//", 2), *code_end = comment ? comment : end;
    const char *at = after_word(line, code_end, ".entry");
    if (at && !add_function(module, at))
        return false;
    at = at ? NULL : after_word(line, code_end, ".global");
    return !at || add_global(module, at, code_end);
}

static void read_annotations(CUmodule module, const char *text)
{
    for (const char *at = text; (at = strstr(at, ANNOTATION)); at++)
        annotate(module, at + strlen(ANNOTATION));
}

static bool read_text(CUmodule module, const char *text)
{
    for (const char *line = text; *line;) {
        const char *end = strchrnul(line, '\n');
        if (!read_line(module, line, end))
            return false;
        line = *end ? end + 1 : end;
    }
    read_annotations(module, text);
    return true;
}

static bool is_binary(const char *image)
{
    static const unsigned char fatbin[] = { 0x50, 0xed, 0x55, 0xba }, wrapper[] = { 0xb1, 0x43, 0x62, 0x46 };
    return memcmp(image, "\177ELF", 4) == 0 || memcmp(image, fatbin, 4) == 0 || memcmp(image, wrapper, 4) == 0;
}

/* ---- making and ending ----------------------------------------------------------------------------------------------- */

void sim_module_delete(CUmodule module)
{
    while (module->functions) {
        CUfunction function = module->functions;
        module->functions = function->next;
        free(function->name);
        sim_object_delete(function);
    }
    while (module->globals) {
        struct sim_global *global = module->globals;
        module->globals = global->next;
        if (global->address)
            sim_memory_free(global->address);
        free(global->name);
        free(global);
    }
    if (module->code)
        sim_memory_free(module->code);
    sim_object_delete(module);
}

static CUresult parse(const void *image, CUmodule *out)
{
    SIM_REQUIRE(image);
    const char *text = image;
    if (text[0] == '\0')
        return CUDA_ERROR_INVALID_IMAGE;
    if (is_binary(text))
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    CUmodule module = sim_object_new(SIM_KIND_MODULE, sizeof *module);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    if (!read_text(module, text))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else if (!module->functions && !module->globals)
        result = CUDA_ERROR_INVALID_PTX;
    if (result == CUDA_SUCCESS)
        *out = module;
    else
        sim_module_delete(module);
    return result;
}

/* Code lies in device memory, and so do variables, once the module belongs to a context. */
static CUresult place(CUmodule module, CUcontext context, uint64_t code_bytes)
{
    module->context = context;
    SIM_TRY(sim_memory_allocate(context->device, NULL, code_bytes, &module->code));
    for (struct sim_global *global = module->globals; global; global = global->next)
        SIM_TRY(sim_memory_allocate(context->device, NULL, global->bytes, &global->address));
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    CUcontext context;
    CUmodule module;
    SIM_TRY(sim_current(&context));
    SIM_REQUIRE(out);
    SIM_TRY(parse(image, &module));
    CUresult result = place(module, context, strlen(image));
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

/* The options tune a compiler that is not here: it took no time and has nothing to say. */
static void compiled(unsigned int n_options, const CUjit_option *options, void **values)
{
    for (unsigned int i = 0; i < n_options; i++) {
        if ((options[i] == CU_JIT_INFO_LOG_BUFFER || options[i] == CU_JIT_ERROR_LOG_BUFFER) && values[i])
            *(char *)values[i] = '\0';
        if (options[i] == CU_JIT_WALL_TIME || options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
            values[i] = NULL;
    }
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int n_options, CUjit_option *options, void **values)
{
    SIM_REQUIRE(n_options == 0 || (options && values));
    compiled(n_options, options, values);
    return cuModuleLoadData(out, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) { return cuModuleLoadData(out, image); }

static CUresult read_file(const char *path, char **text)
{
    struct stat status;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return CUDA_ERROR_FILE_NOT_FOUND;
    CUresult result = CUDA_ERROR_FILE_NOT_FOUND;
    *text = fstat(fd, &status) == 0 && status.st_size < (off_t)MAX_IMAGE_BYTES ? calloc(1, (size_t)status.st_size + 4) : NULL;
    if (*text && read(fd, *text, (size_t)status.st_size) == status.st_size)
        result = CUDA_SUCCESS;
    close(fd);
    if (result != CUDA_SUCCESS)
        free(*text);
    return result;
}

CUresult cuModuleLoad(CUmodule *out, const char *path)
{
    CUcontext context;
    char *text;
    SIM_TRY(sim_current(&context));
    SIM_TRY(read_file(path, &text));
    CUresult result = cuModuleLoadData(out, text);
    free(text);
    return result;
}

static bool is_module(CUmodule module) { return sim_is(module, SIM_KIND_MODULE); }

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
    *out = find_function(module, name);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
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

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int count, CUmodule module)
{
    SIM_REQUIRE_READY();
    SIM_REQUIRE(functions || count == 0);
    if (!is_module(module))
        return CUDA_ERROR_INVALID_HANDLE;
    CUfunction function = module->functions;
    for (unsigned i = 0; i < count && function; i++, function = function->next)
        functions[i] = function;
    return CUDA_SUCCESS;
}

static CUresult get_global(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name, CUcontext context)
{
    SIM_REQUIRE(name);
    struct sim_global *global = module->globals;
    while (global && strcmp(global->name, name) != 0)
        global = global->next;
    if (!global)
        return CUDA_ERROR_NOT_FOUND;
    if (!global->address)
        SIM_TRY(sim_memory_allocate(context->device, NULL, global->bytes, &global->address));
    if (address)
        *address = global->address;
    if (bytes)
        *bytes = global->bytes;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
    CUcontext context;
    SIM_TRY(sim_current(&context));
    return is_module(module) ? get_global(address, bytes, module, name, context) : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- libraries: modules that belong to no context -------------------------------------------------------------------- */

static CUmodule of_library(CUlibrary library) { return (CUmodule)(void *)library; }
static CUfunction of_kernel(CUkernel kernel) { return (CUfunction)(void *)kernel; }

static CUresult check_library(CUlibrary library)
{
    SIM_REQUIRE_READY();
    return is_module(of_library(library)) && of_library(library)->is_library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult check_kernel(CUkernel kernel)
{
    SIM_REQUIRE_READY();
    return sim_is(kernel, SIM_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *jit, void **jit_values, unsigned int n_jit,
                           CUlibraryOption *options, void **values, unsigned int n_options)
{
    CUmodule module;
    SIM_REQUIRE_READY();
    SIM_REQUIRE(out && (n_jit == 0 || (jit && jit_values)) && (n_options == 0 || (options && values)));
    compiled(n_jit, jit, jit_values);
    SIM_TRY(parse(code, &module));
    module->is_library = true;
    *out = (CUlibrary)(void *)module;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, CUjit_option *jit, void **jit_values, unsigned int n_jit,
                               CUlibraryOption *options, void **values, unsigned int n_options)
{
    char *text;
    SIM_REQUIRE_READY();
    SIM_TRY(read_file(path, &text));
    CUresult result = cuLibraryLoadData(out, text, jit, jit_values, n_jit, options, values, n_options);
    free(text);
    return result;
}

CUresult cuLibraryUnload(CUlibrary library)
{
    SIM_TRY(check_library(library));
    SIM_TRY(sim_capture_unsafe_call());
    sim_module_delete(of_library(library));
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
    SIM_REQUIRE(out && name);
    SIM_TRY(check_library(library));
    *out = (CUkernel)(void *)find_function(of_library(library), name);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary library)
{
    SIM_TRY(check_library(library));
    return cuModuleGetFunctionCount(count, of_library(library));
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary library)
{
    SIM_TRY(check_library(library));
    return cuModuleEnumerateFunctions((CUfunction *)(void *)kernels, count, of_library(library));
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    CUcontext context;
    SIM_REQUIRE(module);
    SIM_TRY(check_library(library));
    SIM_TRY(sim_current(&context));
    *module = of_library(library);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
    CUcontext context;
    SIM_TRY(check_library(library));
    SIM_TRY(sim_current(&context));
    return get_global(address, bytes, of_library(library), name, context);
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CUcontext context;
    SIM_REQUIRE(function);
    SIM_TRY(check_kernel(kernel));
    SIM_TRY(sim_current(&context));
    *function = of_kernel(kernel);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    SIM_REQUIRE(library);
    SIM_TRY(check_kernel(kernel));
    if (!of_kernel(kernel)->module->is_library)
        return CUDA_ERROR_INVALID_HANDLE;
    *library = (CUlibrary)(void *)of_kernel(kernel)->module;
    return CUDA_SUCCESS;
}

/* ---- functions ------------------------------------------------------------------------------------------------------- */

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction function, const struct sim_device *device)
{
    SIM_REQUIRE(value);
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = (int)(device->hardware->compute_major * 10 + device->hardware->compute_minor); break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function->max_dynamic_shared_bytes ? function->max_dynamic_shared_bytes : 49152;
        break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = function->carveout; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: *value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUfunction_attribute attribute, int value, CUfunction function, const struct sim_device *device)
{
    int most = 0;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device->ordinal);
        SIM_REQUIRE(value >= 0 && value <= most);
        function->max_dynamic_shared_bytes = value;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        SIM_REQUIRE(value >= -1 && value <= 100);
        function->carveout = value;
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult check_function(CUfunction function, CUcontext *context)
{
    SIM_TRY(sim_current(context));
    return sim_is(function, SIM_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    CUcontext context;
    SIM_TRY(check_function(function, &context));
    return get_attribute(value, attribute, function, context->device);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    CUcontext context;
    SIM_TRY(check_function(function, &context));
    return set_attribute(attribute, value, function, context->device);
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice ordinal)
{
    SIM_TRY(check_kernel(kernel));
    struct sim_device *device = sim_device_of(ordinal);
    return device ? get_attribute(value, attribute, of_kernel(kernel), device) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice ordinal)
{
    SIM_TRY(check_kernel(kernel));
    struct sim_device *device = sim_device_of(ordinal);
    return device ? set_attribute(attribute, value, of_kernel(kernel), device) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice ordinal)
{
    SIM_TRY(check_kernel(kernel));
    if (!sim_device_of(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    of_kernel(kernel)->cache_config = (int)config;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    CUcontext context;
    SIM_TRY(check_function(function, &context));
    function->cache_config = (int)config;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig config)
{
    CUcontext context;
    (void)config;   /* banks have had one size since Maxwell */
    return check_function(function, &context);
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    CUcontext context;
    SIM_REQUIRE(module);
    SIM_TRY(check_function(function, &context));
    *module = function->module;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function)
{
    SIM_REQUIRE(name);
    SIM_TRY(check_kernel((CUkernel)(void *)function));
    *name = function->name;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) { return cuFuncGetName(name, of_kernel(kernel)); }

CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    CUcontext context;
    SIM_REQUIRE(state);
    SIM_TRY(check_function(function, &context));
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function)
{
    CUcontext context;
    return check_function(function, &context);
}
