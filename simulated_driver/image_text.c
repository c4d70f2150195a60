/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_text.c - images that are text. What counts in it:
 *     .entry NAME(.param .u64 A, .param .align 8 .b8 B[24])    a kernel and its parameters (PTX; the body is not looked at)
 *     .local .align 8 .b8 NAME[BYTES];                         memory of each thread of the kernel before it
 *     .global .b8 NAME[BYTES];   .const .u64 NAME;             a variable; it begins as zeros, whatever its initial value is
 *     // aliquot-sim: NAME duration_us=NUMBER                  how long one launch of NAME takes, alone on the whole GPU
 * Text without any of these, and without the .version that begins each PTX module, is invalid PTX.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include "simulated_driver/image.h"

#define ANNOTATION "aliquot-sim:"

static bool is_name_char(char c)
{
	return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

static const char *skip_blanks(const char *at)
{
	while (*at == ' ' || *at == '\t')
		at++;
	return at;
}

static const char *skip_name(const char *at)
{
	while (is_name_char(*at))
		at++;
	return at;
}

/* The text behind `word` when the line contains it as a separate word. */
static const char *after_word(const char *line, const char *end, const char *word)
{
	size_t length = strlen(word);
	for (const char *at = line; (at = memmem(at, (size_t)(end - at), word, length)); at++)
		if (!is_name_char(at[length]) && (at == line || !is_name_char(at[-1])))
			return at + length;
	return NULL;
}

/* ---- declarations ------------------------------------------------------------------------------------------------------- */

/* ".align 4 .b8 buffer[1024]": the size of an element, the alignment, the name and the number of elements. */
struct declaration {
	const char *name, *name_end;
	uint64_t element_bytes, alignment, count;
	bool is_pointer; /* the alignment that follows is that of what it points to */
};

static uint64_t type_bytes(const char *word, size_t length)
{
	/* ".b8", ".u64", ".f32": the number of bits ends the word */
	unsigned bits = 0;
	for (size_t i = 2; i < length; i++)
		bits = isdigit((unsigned char)word[i]) ? bits * 10 + (unsigned)(word[i] - '0') : 0;
	return strchr("busf", word[1]) && (bits == 8 || bits == 16 || bits == 32 || bits == 64) ? bits / 8 : 0;
}

/* A word with a dot in front, and the number behind it when it is .align. */
static const char *read_directive(const char *at, struct declaration *found)
{
	const char *word = at, *end = skip_name(at + 1);
	uint64_t bytes = end - word > 1 ? type_bytes(word, (size_t)(end - word)) : 0;
	found->element_bytes = bytes ? bytes : found->element_bytes;
	if (*end == '(') /* .attribute(.managed) */
		return *(end = strchrnul(end, ')')) ? end + 1 : end;
	found->is_pointer |= end - word == 4 && strncmp(word, ".ptr", 4) == 0;
	const char *number = skip_blanks(end);
	if (!isdigit((unsigned char)*number))
		return end;
	uint64_t value = strtoull(number, (char **)&end, 10);
	if (strncmp(word, ".align", 6) == 0 && value && value <= 1 << 20 && !found->is_pointer)
		found->alignment = value;
	return end;
}

/* True when a name was found before `end`. */
static bool read_declaration(const char *at, const char *end, struct declaration *found)
{
	*found = (struct declaration){ .element_bytes = 1, .count = 1 };
	for (at = skip_blanks(at); at < end && *at == '.'; at = skip_blanks(at))
		at = read_directive(at, found);
	if (at >= end || !is_name_char(*at))
		return false;
	found->name = at;
	found->name_end = skip_name(at);
	if (*found->name_end == '[')
		found->count = strtoull(found->name_end + 1, NULL, 10);
	found->count = found->count ? found->count : 1;
	return found->name_end <= end;
}

static uint64_t declared_bytes(const struct declaration *declared)
{
	return declared->count < UINT64_MAX / 16 ? declared->element_bytes * declared->count : UINT64_MAX / 2;
}

/* ---- kernels and variables ---------------------------------------------------------------------------------------------- */

/* From behind the opening bracket up to the closing one. */
static bool read_parameters(struct sim_image_kernel *kernel, const char *at)
{
	const char *end = strchrnul(at, ')');
	uint64_t offset = 0;
	while ((at = after_word(at, end, ".param"))) {
		struct declaration declared;
		if (!read_declaration(at, end, &declared))
			continue;
		uint64_t bytes = declared_bytes(&declared);
		uint64_t alignment = declared.alignment > declared.element_bytes ? declared.alignment : declared.element_bytes;
		offset = (offset + alignment - 1) / alignment * alignment;
		if (bytes > UINT32_MAX / 2 || offset > UINT32_MAX / 2)
			return true; /* more than a kernel can have */
		struct sim_image_parameter parameter = { kernel->n_parameters, (uint32_t)offset, (uint32_t)bytes };
		if (!sim_image_add_parameter(kernel, parameter))
			return false;
		offset += bytes;
	}
	return true;
}

static bool add_kernel(struct sim_image *image, const char *at)
{
	at = skip_blanks(at);
	const char *end = skip_name(at);
	if (end == at)
		return true; /* the word stood in a comment */
	char *name = strndup(at, (size_t)(end - at));
	if (name && sim_image_kernel(image, name)) {
		free(name);
		return true;
	}
	struct sim_image_kernel *kernel = sim_image_add_kernel(image, name);
	end = skip_blanks(end);
	return kernel && (*end != '(' || read_parameters(kernel, end + 1));
}

static bool add_variable(struct sim_image *image, const char *at, const char *line_end)
{
	struct declaration declared;
	const char *managed = after_word(at, line_end, ".managed");
	if (!read_declaration(at, line_end, &declared))
		return true;
	uint32_t block = sim_image_add_block(image, managed && managed < declared.name);
	struct sim_image_variable *variable = block == UINT32_MAX
						      ? NULL
						      : sim_image_add_variable(
								image, strndup(declared.name, (size_t)(declared.name_end - declared.name)),
								declared_bytes(&declared));
	if (!variable)
		return false;
	variable->block = block;
	image->blocks[block].bytes = variable->bytes;
	return true;
}

static void add_local(struct sim_image *image, const char *at, const char *line_end)
{
	struct declaration declared;
	if (!image->n_kernels || !read_declaration(at, line_end, &declared))
		return;
	struct sim_image_kernel *kernel = &image->kernels[image->n_kernels - 1];
	uint64_t bytes = kernel->local_bytes + declared_bytes(&declared);
	kernel->local_bytes = bytes < UINT32_MAX / 2 ? (uint32_t)bytes : UINT32_MAX / 2;
}

/* ".extern .func (.param .b64 result) malloc": a function of the driver. */
static void note_call(struct sim_image *image, const char *line, const char *end)
{
	static const char *const names[] = { "malloc", "free", "vprintf" };
	for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
		if (after_word(line, end, names[i]))
			sim_image_note_call(image, names[i]);
}

static void annotate(struct sim_image *image, const char *at)
{
	double microseconds;
	char name[256];
	if (sscanf(at, " %255s duration_us=%lf", name, &microseconds) != 2 || !(microseconds >= 0 && microseconds < 1e15))
		return;
	struct sim_image_kernel *kernel = sim_image_kernel(image, name);
	if (kernel)
		kernel->duration_ns = (uint64_t)(microseconds * 1000) + 1; /* 0 would mean: by grid size */
}

static bool read_line(struct sim_image *image, const char *line, const char *end)
{
	const char *comment = memmem(line, (size_t)(end - line), "//", 2), *code_end = comment ? comment : end;
	const char *at = after_word(line, code_end, ".entry");
	if (at && !add_kernel(image, at))
		return false;
	if (after_word(line, code_end, ".extern") && after_word(line, code_end, ".func"))
		note_call(image, line, code_end);
	if (at || after_word(line, code_end, ".extern") || after_word(line, code_end, ".param"))
		return true; /* ".param .u64 .ptr .global" is no variable */
	at = after_word(line, code_end, ".local");
	if (at)
		add_local(image, at, code_end);
	at = after_word(line, code_end, ".global");
	at = at ? at : after_word(line, code_end, ".const");
	return !at || add_variable(image, at, code_end);
}

CUresult sim_image_read_text(const char *text, struct sim_image *out)
{
	for (const char *line = text; *line;) {
		const char *end = strchrnul(line, '\n');
		if (!read_line(out, line, end))
			return CUDA_ERROR_OUT_OF_MEMORY;
		line = *end ? end + 1 : end;
	}
	for (const char *at = text; (at = strstr(at, ANNOTATION)); at++)
		annotate(out, at + strlen(ANNOTATION));
	out->code_bytes = strlen(text);
	bool is_ptx = out->n_kernels || out->n_variables || after_word(text, text + out->code_bytes, ".version");
	return is_ptx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}
