"""The report's looks: light and dark by the reader's system, and paper."""

from __future__ import annotations

from . import svg

STYLE = f"""
:root{{color-scheme:light dark;{svg.variables(svg.LIGHT)}}}
@media screen and (prefers-color-scheme:dark){{:root{{{svg.variables(svg.DARK)}}}}}
*{{box-sizing:border-box}}
html{{font-family:{svg.FONT};background:var(--paper);color:var(--ink);line-height:1.5;-webkit-text-size-adjust:100%}}
body{{max-width:1240px;margin:0 auto;padding:2.2rem 1.5rem 4rem}}
header p{{color:var(--soft);margin:.25rem 0 0}}
h1{{font-size:1.75rem;line-height:1.2;margin:0;letter-spacing:-.015em;text-wrap:balance}}
h2{{font-size:1.2rem;margin:2.6rem 0 .3rem;letter-spacing:-.01em}}
h3{{font-size:.86rem;font-weight:600;margin:0 0 .1rem .25rem}}
p,li{{max-width:78ch}}
.opening{{display:grid;grid-template-columns:minmax(0,10fr) minmax(0,11fr);gap:0 1.6rem;align-items:start;margin-top:1.5rem}}
.lead{{font-size:1.2rem;line-height:1.5;margin:.2rem 0 .6rem;text-wrap:pretty}}
.weakest{{font-size:1.05rem;margin:.2rem 0 .8rem;max-width:72ch}}
.finding{{border-left:4px solid var(--rule);padding:.1rem 0 .1rem 1.2rem;margin:0 0 1rem}}
.notes{{margin:.3rem 0;padding-left:1.15rem;color:var(--soft);font-size:.92rem}}
.notes li{{margin:.18rem 0}}
.caption{{color:var(--soft);font-size:.9rem;margin:.1rem 0 .7rem;max-width:96ch}}
figure{{margin:0 0 1.2rem}}
.panels{{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:.9rem}}
.panels.wide{{grid-template-columns:1fr}}
.panel{{background:var(--card);border:1px solid var(--rule);border-radius:7px;padding:.65rem .6rem .3rem;min-width:0}}
.panel svg{{display:block;width:100%;height:auto;max-width:520px;margin:0 auto}}
.wide .panel{{overflow-x:auto}}
.wide .panel svg{{min-width:560px;max-width:none}}
.legend{{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:0 0 .6rem;padding:0;list-style:none;font-size:.85rem;color:var(--soft)}}
.legend i{{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.45em;vertical-align:-.05em}}
.scroll{{overflow-x:auto;border:1px solid var(--rule);border-radius:7px;background:var(--card)}}
table{{border-collapse:collapse;width:100%;font-size:.84rem;font-variant-numeric:tabular-nums}}
th,td{{padding:.36rem .55rem;text-align:right;white-space:nowrap}}
th:first-child,td:first-child{{text-align:left}}
thead th{{font-weight:600;color:var(--soft);border-bottom:1px solid var(--rule);vertical-align:bottom}}
tbody tr+tr td,tbody tr+tr th{{border-top:1px solid var(--grid)}}
tbody th{{font-weight:600}}
tr.group th{{background:var(--grid);color:var(--ink);text-align:left}}
td b{{font-weight:700}}
td small{{display:block;color:var(--faint);font-size:.8em;line-height:1.2}}
.bad{{color:var(--alarm);font-weight:600}}
.dot{{display:inline-block;width:.65em;height:.65em;border-radius:50%;margin-right:.5em}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.22rem 1.2rem;margin:.5rem 0;font-size:.9rem}}
dt{{color:var(--soft)}} dd{{margin:0;overflow-wrap:anywhere;min-width:0}}
.setup{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:0 2.4rem}}
.setup h3{{margin:.9rem 0 0;font-size:.92rem}}
code{{font-family:ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.92em;overflow-wrap:anywhere}}
details{{border-top:1px solid var(--grid);padding:.5rem 0}}
summary{{cursor:pointer;color:var(--soft);font-size:.95rem}}
summary:hover{{color:var(--ink)}}
footer{{margin-top:3rem;border-top:1px solid var(--rule);padding-top:.8rem;color:var(--faint);font-size:.85rem}}
@media screen and (max-width:1080px){{.panels{{grid-template-columns:repeat(auto-fit,minmax(min(310px,100%),1fr))}}
.panels.wide{{grid-template-columns:1fr}} .opening{{grid-template-columns:1fr}}}}
@media screen and (max-width:640px){{
body{{padding:1.2rem .9rem 3rem}} h1{{font-size:1.35rem}} .lead{{font-size:1.08rem}}
dl{{grid-template-columns:1fr;gap:0}} dd{{margin-bottom:.4rem}}
}}
@media print{{
@page{{size:A4;margin:14mm 13mm}}
html{{font-size:10.5px}} body{{padding:0;max-width:none}}
.opening{{grid-template-columns:1fr}} .opening .panel svg{{max-width:620px}} .panels.wide{{grid-template-columns:1fr}}
.wide .panel svg{{min-width:0}} .wide .panel,.scroll{{overflow:visible}}
.panel,tr,.finding{{break-inside:avoid}} h2,.caption,.legend{{break-after:avoid}} table{{font-size:.8rem}} th,td{{padding:.25rem .4rem}}
.setup{{grid-template-columns:1fr 1fr}}
details::details-content{{content-visibility:visible;block-size:auto}} summary{{list-style:none}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
}}
"""
