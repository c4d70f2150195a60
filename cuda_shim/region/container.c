#include "region/container.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DIRECTORY "/run/aliquot"
#define PATH_BYTES (PATH_MAX + sizeof(DIRECTORY "/priority")) /* the longest of the names */

static bool has_limits(const char *root)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s" DIRECTORY "/limits", root);
	/* Anything but absence is an answer: a file that cannot be read must fail loudly, not send us looking elsewhere. */
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

/* A page of the node that begins with `magic`. A container that has none, or a damaged one, goes without. */
static void *map_page(const char *path, size_t bytes, uint64_t magic, bool writable)
{
	int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);

	if (fd < 0)
		return NULL;
	/* Not fstat: it would ask for glibc 2.33. */
	void *page = lseek(fd, 0, SEEK_END) >= (off_t)bytes
			     ? mmap(NULL, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0)
			     : MAP_FAILED;
	close(fd);
	if (page == MAP_FAILED)
		return NULL;
	if (*(const uint64_t *)page == magic)
		return page;
	munmap(page, bytes);
	return NULL;
}

static void map_node_pages(struct aq_node_pages *node, const char *root)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s" DIRECTORY "/priority", root);
	node->priority = map_page(path, sizeof(struct aq_priority_page), AQ_PRIORITY_MAGIC, true);
	node->priority_writable = node->priority != NULL;
	if (!node->priority)
		node->priority = map_page(path, sizeof(struct aq_priority_page), AQ_PRIORITY_MAGIC, false);
	snprintf(path, sizeof(path), "%s" DIRECTORY "/turns", root);
	node->turns = map_page(path, sizeof(struct aq_turns_page), AQ_TURNS_MAGIC, true);
}

int aq_container_open(struct aq_container *container, const char *library, enum aq_region_access access, bool *may_pass,
		      struct aq_fault *fault)
{
	char root[PATH_MAX], path[PATH_BYTES];

	*may_pass = false;
	if (!find_root(library, root))
		return aq_fault(fault, "no limits file: want " DIRECTORY "/limits, as the node agent mounts it");
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
	map_node_pages(&container->node, root);
	return 0;
}
