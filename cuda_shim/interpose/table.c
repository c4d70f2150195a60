#include "interpose/table.h"

#include "interpose/driver.h"

const struct aq_hook aq_cuda_hooks[] = {
#define HOOK(symbol, base, since, flavour) \
	{ #symbol, #base, since, AQ_##flavour, (void *)symbol, (void **)(void *)&aq_cuda.symbol },
#define ALSO_AS HOOK
#include "interpose/hooks.def"
#undef HOOK
};

const size_t aq_cuda_hook_count = sizeof(aq_cuda_hooks) / sizeof(aq_cuda_hooks[0]);
