/* SPDX-License-Identifier: Apache-2.0 */
/* dlsym and dlvsym of the preload. libc's own look at their return address: RTLD_NEXT and RTLD_DEFAULT mean "from the caller's place". So
 * the code here keeps all arguments and calls the C side, which says whether the shim has the name. If not, it *jumps* to libc's function:
 * that returns to our caller and sees nothing of us. The C side returns { address, answered } in two registers. */

#if defined(__x86_64__)

.macro LOOKUP name, ask, real
	.globl \name
	.type \name, @function
	.p2align 4
\name:
	.cfi_startproc
	endbr64
	push %rdi
	.cfi_adjust_cfa_offset 8
	push %rsi
	.cfi_adjust_cfa_offset 8
	push %rdx
	.cfi_adjust_cfa_offset 8
	call \ask
	mov %rdx, %rcx
	pop %rdx
	.cfi_adjust_cfa_offset -8
	pop %rsi
	.cfi_adjust_cfa_offset -8
	pop %rdi
	.cfi_adjust_cfa_offset -8
	test %rcx, %rcx
	jz 1f
	ret
1:	jmp *\real(%rip)
	.cfi_endproc
	.size \name, . - \name
.endm

#elif defined(__aarch64__)

.macro LOOKUP name, ask, real
	.globl \name
	.type \name, %function
	.p2align 4
\name:
	.cfi_startproc
	hint #34 /* bti c */
	stp x29, x30, [sp, #-48]!
	.cfi_def_cfa_offset 48
	.cfi_offset x29, -48
	.cfi_offset x30, -40
	mov x29, sp
	stp x0, x1, [sp, #16]
	str x2, [sp, #32]
	bl \ask
	cbnz x1, 1f
	ldp x0, x1, [sp, #16]
	ldr x2, [sp, #32]
	ldp x29, x30, [sp], #48
	adrp x16, \real
	ldr x16, [x16, :lo12:\real]
	br x16
1:	ldp x29, x30, [sp], #48
	ret
	.cfi_endproc
	.size \name, . - \name
.endm

#else
#error "the preload knows x86-64 and aarch64, the machines CUDA runs on"
#endif

	.text
	LOOKUP dlsym, aq_dlsym_lookup, aq_libc_dlsym
	LOOKUP dlvsym, aq_dlvsym_lookup, aq_libc_dlvsym

	.section .note.GNU-stack, "", %progbits
