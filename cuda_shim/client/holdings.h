/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory by every way the driver API gives it out, behind one pair of calls. */
#ifndef AQ_CLIENT_HOLDINGS_H
#define AQ_CLIENT_HOLDINGS_H

#include "client/driver.h"

struct holding {
	unsigned long long a, b; /* what the kind needs to give it back: a pointer, a handle, an address range */
	size_t bytes;
};

struct kind {
	const char *name;
	size_t granule_bytes; /* the smallest useful amount */
	CUresult (*take)(struct holding *holding, size_t bytes);
	CUresult (*give_back)(const struct holding *holding);
};

/* The kind of that name, or NULL. */
const struct kind *kind_find(const char *name);

extern const char kind_names[];

/* The device that kinds which need one use; set once after the context is made. */
extern CUdevice holdings_device;

#endif
