/* SPDX-License-Identifier: Apache-2.0 */
#include "region/container.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DIRECTORY "/run/aliquot"
#define PATH_BYTES (PATH_MAX + sizeof(DIRECTORY "/priority")) /* the longest of the names */

static bool has_limits(const char *root)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s" DIRECTORY "/limits", root);
	/* Only absence means "look elsewhere": a file that exists but cannot be read must fail with an error. */
	return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

/* The root under which run/aliquot/limits lies, into `root` of PATH_MAX bytes. */
static bool find_root(const char *library, char *root)
{
	root[0] = '\0';
	if (has_limits(root))
		return true;
	if (!realpath(library, root))
		return false;
	for (char *slash = strrchr(root, '/'); slash && slash != root; slash = strrchr(root, '/')) {
		*slash = '\0';
		if (has_limits(root))
			return true;
	}
	return false;
}

static void open_node_pages(struct aq_node_pages *node, const char *root)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s" DIRECTORY "/priority", root);
	aq_node_page_open(&node->priority, path, AQ_PRIORITY_MAGIC);
	snprintf(path, sizeof(path), "%s" DIRECTORY "/turns", root);
	aq_node_page_open(&node->turns, path, AQ_TURNS_MAGIC);
}

void aq_node_pages_close(struct aq_node_pages *node)
{
	aq_node_page_close(&node->priority);
	aq_node_page_close(&node->turns);
}

int aq_container_open(struct aq_container *container, const char *library, enum aq_region_access access, bool *may_pass,
		      struct aq_fault *fault)
{
	char root[PATH_MAX], path[PATH_BYTES];

	*may_pass = false;
	if (!find_root(library, root))
		return aq_fault(fault, "no limits file: expected " DIRECTORY "/limits, which the node agent mounts");
	snprintf(path, sizeof(path), "%s" DIRECTORY "/limits", root);
	int failed = aq_limits_map(&container->limits, path, fault);
	*may_pass = container->limits.policy_flags & AQ_POLICY_FAIL_OPEN;
	if (!failed) {
		snprintf(path, sizeof(path), "%s" DIRECTORY "/region", root);
		failed = aq_region_map(&container->region, path, access, fault);
		if (failed)
			aq_region_unmap(&container->region);
	}
	if (failed) {
		aq_limits_unmap(&container->limits);
		return failed;
	}
	if (access == AQ_REGION_WRITE)
		open_node_pages(&container->node, root);
	return 0;
}
