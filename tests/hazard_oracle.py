#!/usr/bin/env python3
"""LLVM hazard oracle for AMDGPU assembly text (exact physical registers).
asm text --llvm-mc -show-inst--> MCInst --this file--> MIR --llc -run-pass=post-RA-hazard-rec--> S_NOPs that LLVM
thinks are missing before each instruction.   usage: hazard_oracle.py [-mcpu gfx950] file.s   (or import run())
Needs llc/llvm-mc of LLVM >= 20 (Debian package llvm-22 installed)."""
import os, re, subprocess, sys, json, tempfile
BIN = os.environ.get('LLVM_BIN', '/usr/lib/llvm-22/bin').rstrip('/') + '/'
ENV = dict(os.environ)
# opcode map learned from llc, kept between runs (the folder of this file may be read-only)
CACHE = os.path.join(tempfile.gettempdir(), 'hazard_oracle_opcodes.json')
try: OPC = json.load(open(CACHE))
except Exception: OPC = {}

def _save():
    tmp = f'{CACHE}.{os.getpid()}'
    with open(tmp, 'w') as f: json.dump(OPC, f, indent=0)
    os.replace(tmp, CACHE)

def sh(cmd, inp):
    p = subprocess.run(cmd, input=inp.encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    return p.returncode, p.stdout.decode(), p.stderr.decode()

def mcinsts(asm, cpu):
    rc, out, err = sh([BIN+'llvm-mc', '-triple=amdgcn-amd-amdhsa', f'-mcpu={cpu}', '-show-inst'], asm)
    if rc: raise RuntimeError(err)
    items, cur = [], None
    for l in out.splitlines():
        s = l.strip()
        m = re.match(r'^([A-Za-z_.$][\w.$]*):', s)
        if m and '<MC' not in s.split(';')[0]:
            items.append(('label', m.group(1))); continue
        m = re.search(r'<MCInst #\d+ (\S+?)(>?)$', s)
        if m:
            cur = {'asm': s.split(';')[0].strip(), 'op': m.group(1).rstrip('>'), 'ops': []}; items.append(('inst', cur)); continue
        m = re.search(r'<MCOperand (\w+):(.*)$', s)
        if m:
            v = m.group(2)
            while v.endswith('>') and v.count('>') > v.count('<'): v = v[:-1]
            cur['ops'].append((m.group(1), v.strip()))
    return items

def cands(mc):
    b = mc
    if b.endswith('_gfx940_vcd'): x = b[:-11]; return [x+'_vgprcd_e64', x+'_vgprcd']
    if b.endswith('_gfx940_acd'): x = b[:-11]; return [x+'_e64', x]
    if b.endswith('_gfx90a_vcd'): x = b[:-11]; return [x+'_vgprcd_e64', x+'_vgprcd']
    if b.endswith('_gfx90a_acd'): x = b[:-11]; return [x+'_e64', x]
    b = re.sub(r'_(vi_gfx9|gfx9_vi|gfx940|gfx90a|gfx9|vi)$', '', b)
    r = [b, b+'_e64', b+'_gfx9', b+'_gfx9_e64']
    b2 = re.sub(r'_(gfx9)(_e32|_e64)$', r'\2', b)
    if b2 != b: r.append(b2)
    r += [b.replace('_dpp', '_dpp'), b+'_e32']
    return list(dict.fromkeys(r))

ZERO = re.compile(r'^(ds_write|ds_add|ds_max|ds_min|.*_store_|s_waitcnt|s_nop|s_barrier|s_setprio|s_sleep|s_branch|s_cbranch|s_endpgm|s_cmp|s_bitcmp|s_setreg|s_sendmsg|s_dcache|s_icache|buffer_wbl2|buffer_inv|s_trap|s_sethalt|s_setvskip|s_wakeup|v_nop|s_ttrace|global_load_lds|s_code_end|s_clause|.*atomic_(add|pk_add)(?!.*(glc|sc0)))')
def ndefs(i):
    a, op = i['asm'], i['op']
    mn = a.split()[0]
    if ZERO.match(mn): return 0
    if mn.startswith('buffer_load') and re.search(r'\blds\b', a): return 0
    if mn.startswith('v_cmp') and ('_e32' in op or '_sdwa' in op): return 0
    if mn.startswith(('v_permlane16_swap', 'v_permlane32_swap', 'v_swap_b32')): return 2
    if mn.startswith(('v_div_scale', 'v_mad_u64_u32', 'v_mad_i64_i32')): return 2
    if re.match(r'v_(add|sub|subrev|addc|subb|subbrev)_co_', mn) and ('_e64' in op): return 2
    return 1

def reg(r):
    r = re.sub(r'_gfxpre11|_vi|_gfx9plus|_gfx11plus', '', r)
    return '$' + r.lower()
def opnd(o, labels):
    k, v = o
    if k == 'Reg': return '$noreg' if v in ('', '0', 'NoRegister') else reg(v)
    if k in ('Imm',): return v
    if k == 'Expr':
        for l in labels:
            if l in v: return f'%bb.{labels[l]}'
        return v
    if k in ('SFPImm', 'DFPImm'): return v
    return v

HDR = '--- |\n  define amdgpu_kernel void @f() { ret void }\n...\n---\nname: f\ntracksRegLiveness: false\nbody: |\n'
def _mir_inst(i, name, impl, labels):
    nd = ndefs(i); ops = [opnd(o, labels) for o in i['ops']]
    s = ''
    if nd: s += ', '.join(ops[:nd]) + ' = '
    s += name + ' ' + ', '.join(ops[nd:] + impl)
    return s.rstrip().rstrip(',')

def learn(i, cpu):
    key = i['op']
    if key in OPC: return OPC[key]
    labels = {}
    lbl = [v for k, v in i['ops'] if k == 'Expr']
    if lbl:
        i = dict(i, ops=[(k, v) if k != 'Expr' else ('Imm', '%bb.1') for k, v in i['ops']])
    last = ''
    for name in cands(key):
        impl = []
        for _ in range(8):
            body = '  bb.0:\n' + ('    successors: %bb.1\n' if lbl else '') + '    ' + _mir_inst(i, name, impl, labels) + '\n' + ('  bb.1:\n' if lbl else '') + '    S_ENDPGM 0\n...\n'
            rc, out, err = sh([BIN+'llc', '-mtriple=amdgcn-amd-amdhsa', f'-mcpu={cpu}', '-run-pass=none', '-x', 'mir', '-', '-o', '-'], HDR + body)
            if rc == 0:
                OPC[key] = [name, impl]; _save(); return OPC[key]
            last = err
            m = re.search(r"missing implicit register operand '([^']*)'", err)
            if not m: break
            impl.append(m.group(1))
    raise RuntimeError(f'cannot map {key}: {i["asm"]}\n{last}')

def run(asm, cpu='gfx950', keep_mir=None):
    """-> list of dict(asm, need=wait states LLVM inserts before it)"""
    items = mcinsts(asm, cpu)
    # basic blocks
    labels, nb = {}, 0; blocks = [[]]; 
    for k, v in items:
        if k == 'label':
            if blocks[-1]: blocks.append([])
            labels[v] = len(blocks) - 1
        else:
            blocks[-1].append(v)
            if re.match(r's_(c?branch|endpgm|setpc)', v['asm']): blocks.append([])
    if not blocks[-1]: 
        blocks[-1].append({'asm': 's_endpgm', 'op': 'S_ENDPGM_vi', 'ops': [('Imm', '0')]})
    n = len(blocks); body = ''; flat = []
    for bi, b in enumerate(blocks):
        succ = []
        last = b[-1]['asm'] if b else ''
        m = re.match(r's_(cbranch_\w+|branch)\s+(\S+)', last)
        if m:
            if m.group(2) in labels: succ.append(labels[m.group(2)])
            if m.group(1).startswith('cbranch') and bi + 1 < n: succ.append(bi + 1)
        elif not last.startswith(('s_endpgm', 's_setpc')) and bi + 1 < n: succ.append(bi + 1)
        body += f'  bb.{bi}:\n' + ('    successors: ' + ', '.join(f'%bb.{s}' for s in dict.fromkeys(succ)) + '\n' if succ else '') + '\n'
        for i in b:
            name, impl = learn(i, cpu)
            body += '    ' + _mir_inst(i, name, impl, labels) + '\n'; flat.append((i, name))
    mir = HDR + body + '...\n'
    if keep_mir: open(keep_mir, 'w').write(mir)
    rc, out, err = sh([BIN+'llc', '-mtriple=amdgcn-amd-amdhsa', f'-mcpu={cpu}', '-mattr=-xnack', '-run-pass=post-RA-hazard-rec', '-x', 'mir', '-', '-o', '-'], mir)
    if rc: raise RuntimeError(err + '\n' + mir)
    outl = [l.strip() for l in out[out.index('body:'):].splitlines()]
    outl = [l for l in outl if l and not l.startswith(('body', 'bb.', 'successors', '...', ';', 'liveins'))]
    res, p, pend = [], 0, 0
    def opname(l):
        l = l.split(' = ', 1)[1] if ' = ' in l else l
        return l.split()[0] if not l.startswith(('frame', 'early')) else l.split()[1]
    prevn = 0
    for i, name in flat:
        tot = 0
        while True:
            l = outl[p]; on = opname(l)
            if name == 'S_NOP' and on == 'S_NOP': break
            if on == name: break
            if on == 'S_NOP': tot += int(re.search(r'S_NOP (\d+)', l).group(1)) + 1; p += 1; continue
            # other inserted instruction
            res.append({'asm': '<inserted> ' + l, 'need': 0}); p += 1
        res.append({'asm': i['asm'], 'need': tot}); p += 1
    return res

if __name__ == '__main__':
    a = sys.argv[1:]; cpu = 'gfx950'
    if a and a[0] == '-mcpu': cpu = a[1]; a = a[2:]
    bad = 0
    for r in run(open(a[0]).read(), cpu):
        if r['need']: bad += 1; print(f"needs s_nop {r['need']-1} ({r['need']} wait states) before: {r['asm']}")
    print('missing wait states at', bad, 'places')
