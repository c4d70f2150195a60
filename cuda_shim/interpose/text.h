/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing names without libc: a sanitizer's run-time replaces strcmp and its like, and looks up libc's own with dlsym while it starts.
 * The preload's dlsym answers then, and must not call what is not there yet. */
#ifndef AQ_INTERPOSE_TEXT_H
#define AQ_INTERPOSE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

static inline bool aq_text_begins(const char *text, const char *with)
{
	while (*with && *text == *with) {
		text++;
		with++;
	}
	return !*with;
}

static inline bool aq_text_is(const char *text, const char *other)
{
	while (*text && *text == *other) {
		text++;
		other++;
	}
	return *text == *other;
}

static inline bool aq_text_has(const char *text, const char *part)
{
	while (*text && !aq_text_begins(text, part))
		text++;
	return aq_text_begins(text, part);
}

/* The last component of a path; the whole when it has one only. */
static inline const char *aq_text_file(const char *path)
{
	const char *file = path;

	for (; *path; path++)
		if (*path == '/')
			file = path + 1;
	return file;
}

#endif
