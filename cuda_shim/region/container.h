/* SPDX-License-Identifier: Apache-2.0 */
/* Where this container's limits and region are. The environment has no say in it, because the tenant controls that. */
#ifndef AQ_REGION_CONTAINER_H
#define AQ_REGION_CONTAINER_H

#include <stdbool.h>

#include "limit/priority.h"
#include "limit/turns.h"
#include "region/limits.h"
#include "region/node_page.h"
#include "region/region.h"

/* What containers of a node share. */
struct aq_node_pages {
	struct aq_node_page priority; /* writable for containers of high priority */
	struct aq_node_page turns;
};

struct aq_container {
	struct aq_limits limits;
	struct aq_region region;
	struct aq_node_pages node;
};

/* Map both files and, for writing, open the node's pages. Looks in /run/aliquot. Without a limits file there, looks in run/aliquot below
 * each directory above `library`, the path of the shim: it may lie in an unpacked root file system. Returns 0, or -1 with the reason;
 * `*may_pass` says whether the limits, as far as they could be read, then allow programs to run without limits. */
int aq_container_open(struct aq_container *container, const char *library, enum aq_region_access access, bool *may_pass,
		      struct aq_fault *fault);

void aq_node_pages_close(struct aq_node_pages *node);

#endif
