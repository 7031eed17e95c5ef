// Fibers. A switch saves one stack and the registers that a callee must preserve, and continues on another.
#include <cstring>

#include "machine.h"

#if defined(__x86_64__)
asm(R"(.text
.p2align 4
.type msl_switch,@function
.globl msl_switch
.hidden msl_switch
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
// Follows AAPCS64; not tested yet, because all machines so far were x86-64.
asm(R"(.text
.p2align 4
.globl msl_switch
.hidden msl_switch
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "fibers are written for x86-64 and aarch64"
#endif

namespace msl {

// Prepares a stack on which msl_switch "returns" into `start`; returns its stack pointer.
void* initial_stack_pointer(uint8_t* stack, void (*start)()) {
  auto* top = reinterpret_cast<uint64_t*>(stack + kStackBytes - 64);
#if defined(__x86_64__)
  constexpr int kSavedRegisters = 6;
  *--top = 0;  // in place of a return address; aligns the stack as at a call
  *--top = reinterpret_cast<uint64_t>(start);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
#else
  constexpr int kSavedWords = 20, kLinkRegister = 11;
  top -= kSavedWords;
  std::memset(top, 0, kSavedWords * sizeof(uint64_t));
  top[kLinkRegister] = reinterpret_cast<uint64_t>(start);
#endif
  return top;
}

void to_scheduler() {
  machine.launch->num_switches++;
  msl_switch(&machine.current->stack_pointer, machine.scheduler_stack_pointer);
}

void leave() {
  for (;;) to_scheduler();
}

}  // namespace msl
