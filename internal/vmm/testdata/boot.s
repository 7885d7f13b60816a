# A guest of one disk sector: the firmware loads it to 0x7c00 and jumps there. It
# counts at 0x500, prints "tick NNNN" to the serial port for each count, and after
# `limit` ticks does `action`: 1 power off, 2 reboot, 3 report a panic, 4 flood the
# console. guest_test.go holds the assembled bytes:
#   as --32 boot.s -o boot.o && ld -m elf_i386 -Ttext 0x7c00 --oformat binary boot.o -o boot.bin
.intel_syntax noprefix
.code16
start:
  cli
  xor ax,ax
  mov ds,ax
  mov ss,ax
  mov sp,0x7c00
  mov word ptr [0x500],ax
tick:
  inc word ptr [0x500]
  mov si,offset msg
puts:
  lodsb
  test al,al
  jz number
  call putc
  jmp puts
number:
  mov bx,[0x500]
  mov cl,4
digit:
  rol bx,4
  mov al,bl
  and al,15
  add al,'0'
  cmp al,'9'
  jbe put
  add al,39
put:
  call putc
  dec cl
  jnz digit
  mov al,10
  call putc
  mov ecx,0x200000
delay:
  dec ecx
  jnz delay
  mov ax,[0x500]
  cmp ax,[limit]
  jb tick
  mov al,[action]
  cmp al,1
  je poweroff
  cmp al,2
  je reboot
  cmp al,3
  je panic
  cmp al,4
  jne tick
flood:
  mov al,'x'
  call putc
  jmp flood
poweroff:
  mov dx,0x604
  mov ax,0x2000
  out dx,ax
  jmp tick
reboot:
  mov al,0xfe
  out 0x64,al
  jmp tick
panic:
  mov dx,0x505
  mov al,1
  out dx,al
  jmp tick
putc:
  push ax
wait:
  mov dx,0x3fd
  in al,dx
  test al,0x20
  jz wait
  pop ax
  mov dx,0x3f8
  out dx,al
  ret
msg: .asciz "tick "
.org 0x1f0
limit: .word 0xffff
action: .byte 0
.org 0x1fe
.word 0xaa55
