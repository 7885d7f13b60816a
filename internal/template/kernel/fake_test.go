package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
)

// fakeModule returns a relocatable ELF file whose only content is a .modinfo section.
func fakeModule(depends string) []byte {
	const headerSize, sectionSize = 64, 64
	info := "license=GPL\x00depends=" + depends + "\x00name=x\x00"
	names := "\x00.modinfo\x00.shstrtab\x00"
	infoAt := uint64(headerSize)
	namesAt := infoAt + uint64(len(info))
	sectionsAt := namesAt + uint64(len(names))
	h := elf.Header64{
		Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: sectionsAt, Ehsize: headerSize, Shentsize: sectionSize, Shnum: 3, Shstrndx: 2,
	}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01")
	var b bytes.Buffer
	put := func(v any) {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	put(h)
	b.WriteString(info + names)
	put(elf.Section64{})
	put(elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: infoAt, Size: uint64(len(info)), Addralign: 1})
	put(elf.Section64{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: namesAt, Size: uint64(len(names)), Addralign: 1})
	return b.Bytes()
}
