"""How a page looks: its style sheet, and the pattern that hatches bars."""

STYLE = """
:root { --paper:#fff; --ink:#1b1f24; --quiet:#5a636e; --rule:#d8dde3; --soft:#f3f5f8; --on:#fff; --alert:#a33a00;
  --c0:#0067a3; --c1:#b84a00; --c2:#00795a; --c3:#a1437b; --c4:#6a4fb3; --c5:#7a5f00; }
@media screen and (prefers-color-scheme: dark) { :root { --paper:#14171b; --ink:#e8ebef; --quiet:#a3adb8;
  --rule:#343b44; --soft:#1d2228; --on:#0d1013; --alert:#ff9d66; --c0:#58b4ee; --c1:#f2955a; --c2:#3fc49c; --c3:#e594c4;
  --c4:#b7a2f2; --c5:#dcb94a; } }
.s0 { --c:var(--c0); } .s1 { --c:var(--c1); } .s2 { --c:var(--c2); } .s3 { --c:var(--c3); } .s4 { --c:var(--c4); }
.s5 { --c:var(--c5); } .hatched { --c:var(--c1); }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
  "Helvetica Neue",Arial,sans-serif; font-variant-numeric:tabular-nums; -webkit-text-size-adjust:100%; }
main { max-width:1000px; margin:0 auto; padding:48px 24px 72px; overflow-wrap:break-word; }
h1 { font-size:1.9rem; line-height:1.2; margin:0; letter-spacing:-.015em; }
h2 { font-size:1.25rem; margin:0 0 4px; letter-spacing:-.01em; }
h3 { font-size:1rem; margin:16px 0 4px; }
p { margin:0 0 12px; max-width:72ch; }
section { margin-top:52px; }
section > p, .quiet, .facts { color:var(--quiet); }
.eyebrow { font-size:.8rem; letter-spacing:.08em; text-transform:uppercase; color:var(--quiet); margin:0 0 6px; }
.facts { margin:6px 0 28px; }
.which { margin:0 0 2px; color:var(--quiet); } .which b { color:var(--ink); }
.verdict { font-size:1.4rem; line-height:1.35; font-weight:600; max-width:34em; letter-spacing:-.01em; }
.alert { border-left:4px solid var(--alert); padding:6px 14px; margin-bottom:20px; background:var(--soft); }
.alert b { color:var(--alert); }
.big { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:0 28px; margin-top:28px; }
.big div { border-top:2px solid var(--ink); padding:10px 0 20px; }
.big p { margin:0; } .number { font-size:2.1rem; font-weight:650; line-height:1.15; letter-spacing:-.02em; }
.number small { font-size:1.05rem; font-weight:500; letter-spacing:0; }
.range { color:var(--quiet); font-size:.85rem; }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr)); gap:32px 40px;
  margin-top:20px; }
figure { margin:0; min-width:0; break-inside:avoid; }
svg.chart { width:calc(100% - 54px); margin-left:54px; }
figcaption { font-weight:600; margin-bottom:4px; }
svg { display:block; overflow:visible; } svg svg { overflow:visible; } svg.clip, svg.stack { overflow:hidden; }
svg text { font-size:12px; fill:var(--ink); } text.tick, text.note { fill:var(--quiet); }
text.value { font-weight:600; } text.value, text.note, text.tick { paint-order:stroke; stroke:var(--paper);
  stroke-width:4px; stroke-linejoin:round; }
.grid { stroke:var(--rule); } .base { stroke:var(--quiet); } .goal { stroke:var(--ink); stroke-dasharray:5 4; }
.stretch { stroke:var(--c); stroke-width:2; } .whisker { stroke:var(--c); stroke-width:1.5; fill:none; }
.mark { fill:var(--c); stroke:var(--paper); stroke-width:1.5; }
.missing { stroke:var(--alert); stroke-width:2; }
.trace { fill:none; stroke:var(--c); stroke-width:1.5; vector-effect:non-scaling-stroke; stroke-linejoin:round; }
.fill { fill:var(--c); } .fill.hatched { fill:url(#hatch); } .edge { stroke:var(--paper); stroke-width:3; }
.soft { fill-opacity:.72; }
.over { stroke:var(--ink); stroke-width:1.5; } .stack text { fill:var(--on); font-weight:600; }
#hatch rect { fill:var(--c1); } #hatch path { stroke:var(--paper); stroke-opacity:.3; stroke-width:2; }
.legend { list-style:none; display:flex; flex-wrap:wrap; gap:4px 22px; margin:14px 0 0; padding:0; font-size:.9rem; }
.legend svg { display:inline-block; vertical-align:-2px; margin-right:4px; }
.rows { margin-top:10px; }
.row { display:flex; flex-wrap:wrap; gap:3px 16px; padding:8px 0; font-size:.9rem; break-inside:avoid; }
.row > span { flex:1 1 12em; overflow-wrap:anywhere; }
.row > .at { flex:0 1 auto; margin-left:auto; font-weight:600; text-align:right; }
.row > svg { flex:0 0 100%; }
.quiet { font-size:.9rem; padding-left:1.2em; }
.scroll { overflow-x:auto; margin-top:24px; }
table { border-collapse:collapse; width:100%; font-size:.9rem; }
caption { text-align:left; font-weight:600; padding-bottom:4px; }
caption::first-letter, th.group::first-letter { text-transform:uppercase; }
th.group { font-weight:600; padding-top:20px; }
th, td { text-align:right; padding:7px 0 7px 20px; vertical-align:top; font-weight:400; white-space:nowrap; }
th:first-child { text-align:left; padding-left:0; white-space:normal; min-width:9em; }
thead th { color:var(--quiet); border-bottom:1px solid var(--quiet); vertical-align:bottom; }
tbody tr + tr > * { border-top:1px solid var(--rule); } td small { display:block; color:var(--quiet); font-size:.8rem; }
tr { break-inside:avoid; }
dl { display:grid; grid-template-columns:minmax(7em,13em) 1fr; gap:6px 24px; margin:12px 0 0; font-size:.95rem; }
dt { color:var(--quiet); } dd { margin:0; min-width:0; overflow-wrap:anywhere; max-width:72ch; }
pre { background:var(--soft); padding:12px 14px; margin:0; white-space:pre-wrap; overflow-wrap:anywhere;
  font-size:.85rem; }
@media (max-width:520px) { main { padding:28px 16px 48px; }
  dl { grid-template-columns:1fr; gap:0; } dd { margin-bottom:10px; }
  table { font-size:.82rem; } th, td { padding-left:11px; } th:first-child { min-width:6em; }
  h1 { font-size:1.5rem; } .verdict { font-size:1.2rem; } .number { font-size:1.7rem; }
  .big { grid-template-columns:repeat(auto-fit,minmax(120px,1fr)); gap:0 20px; } }
@media print { main { max-width:none; padding:0; } section { margin-top:32px; }
  h2, thead, caption, section > p, .legend { break-after:avoid; }
  body { font-size:11pt; print-color-adjust:exact; -webkit-print-color-adjust:exact; } .scroll { overflow:visible; } }
"""
HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs><pattern id="hatch" width="7" '
    'height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7"/>'
    '<path d="M1 0V7"/></pattern></defs></svg>'
)
