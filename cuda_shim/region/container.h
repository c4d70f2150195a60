/* Where this container's limits and region are. Never told by the environment: the tenant writes that. */
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

/* Map both files and, for writing, open the node's pages. Looks in /run/aliquot; when that has no limits file, in run/aliquot below
 * each directory above `library`, the path of the shim (an unpacked root file system that is nobody's root). Returns 0, or -1 with the reason;
 * `*may_pass` tells whether the limits, as far as they could be read, want programs to run unlimited then. */
int aq_container_open(struct aq_container *container, const char *library, enum aq_region_access access, bool *may_pass,
		      struct aq_fault *fault);

void aq_node_pages_close(struct aq_node_pages *node);

#endif
