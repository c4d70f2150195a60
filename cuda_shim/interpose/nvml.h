/* The real NVML, and the prototypes of what we wrap of it. */
#ifndef AQ_INTERPOSE_NVML_H
#define AQ_INTERPOSE_NVML_H

#include "interpose/object.h"
#include "nvml_abi.h"

#define AQ_NVML_SONAME "libnvidia-ml.so.1"
#define AQ_NVML_DRIVER_NAME "libnvidia-ml.aliquot-driver.so.1"

#define HIDE(symbol)
#define DENY(symbol)

#pragma GCC visibility push(default)
#define HOOK(symbol, arguments) nvmlReturn_t symbol arguments;
#include "interpose/nvml_hooks.def"
#undef HOOK
#pragma GCC visibility pop

struct aq_nvml_driver {
#define HOOK(symbol, arguments) nvmlReturn_t(*symbol) arguments;
#define USE(symbol, arguments) nvmlReturn_t(*symbol) arguments;
#include "interpose/nvml_hooks.def"
#include "interpose/nvml_calls.def"
#undef HOOK
#undef USE
};

#undef HIDE
#undef DENY

/* What the library at hand lacks answers NVML_ERROR_FUNCTION_NOT_FOUND. */
extern struct aq_nvml_driver aq_nvml;

/* Take this object for the real NVML, unless one was found before. */
void aq_nvml_bind_to(const struct aq_object *object);

#endif
