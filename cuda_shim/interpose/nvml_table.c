/* SPDX-License-Identifier: Apache-2.0 */
/* The NVML rows of the hook table, and the entry points that need no code of their own. */
#include "interpose/hooks.h"
#include "interpose/nvml.h"

#define HOOK(symbol, arguments)
#define REFUSE_WITH(symbol, code)                                                                 \
	__attribute__((visibility("default"))) nvmlReturn_t symbol(void);                         \
	nvmlReturn_t symbol(void)                                                                 \
	{                                                                                         \
		return code;                                                                      \
	}
#define HIDE(symbol) REFUSE_WITH(symbol, NVML_ERROR_NOT_SUPPORTED)
#define DENY(symbol) REFUSE_WITH(symbol, NVML_ERROR_NO_PERMISSION)
#include "interpose/nvml_hooks.def"
#undef HOOK
#undef HIDE
#undef DENY

const struct aq_hook aq_nvml_hooks[] = {
#define HOOK(name, arguments) { .symbol = #name, .wrapper = (void *)name, .real = (void **)(void *)&aq_nvml.name },
#define HIDE(name) { .symbol = #name, .wrapper = (void *)name },
#define DENY(name) { .symbol = #name, .wrapper = (void *)name },
#include "interpose/nvml_hooks.def"
#undef HOOK
#undef HIDE
#undef DENY
};

const size_t aq_nvml_hook_count = sizeof(aq_nvml_hooks) / sizeof(aq_nvml_hooks[0]);
