/* SPDX-License-Identifier: Apache-2.0 */
/* The real NVML, and the prototypes of what we wrap of it. */
#ifndef AQ_INTERPOSE_NVML_H
#define AQ_INTERPOSE_NVML_H

#include "interpose/naming.h"
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

/* A call that the library lacks returns NVML_ERROR_FUNCTION_NOT_FOUND. */
extern struct aq_nvml_driver aq_nvml;

/* Take this object for the real NVML, unless one was found before. */
void aq_nvml_bind_to(const struct aq_object *object);

enum aq_nvml_mode { AQ_NVML_UNDECIDED, AQ_NVML_LIMITED, AQ_NVML_PASSING, AQ_NVML_REFUSING };

/* Opens the container's files at the first call; a wrapper answers for the container only when it is limited. */
enum aq_nvml_mode aq_nvml_decide(void);

#define AQ_NVML_LIMITED_OR_RETURN(call)                                                              \
	do {                                                                                         \
		enum aq_nvml_mode mode_ = aq_nvml_decide();                                          \
		if (mode_ != AQ_NVML_LIMITED)                                                        \
			return mode_ == AQ_NVML_PASSING ? aq_nvml.call : NVML_ERROR_NO_PERMISSION;   \
	} while (0)

/* The container's processes of one of the driver's lists, as nvmlProcessInfo_v2_t at every `stride` bytes. With too little room, the number
 * it takes and NVML_ERROR_INSUFFICIENT_SIZE. */
nvmlReturn_t aq_nvml_list(nvmlDevice_t device, enum aq_listed_as wanted, unsigned int *count, void *processes, size_t stride);

#endif
