//! How a page looks.

pub(super) const CSS: &str = "
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #6b7480; --line: #d5dae0; --paper: #fff;
  --good: #1a7f4b; --bad: #c2372e; --a: #2f6fde; --b: #d9822b; --c: #8250df; --d: #1a8f8f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ed; --faint: #97a1ad; --line: #363d47;
  --paper: #14181d; --good: #4cc38a; --bad: #ff7b72; --a: #6ea8fe; --b: #f0a75e; --c: #b392f0;
  --d: #56c7c7; } }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 1.5rem; }
h1 { margin: 0 0 .5rem; } h2 { margin: 2.5rem 0 .25rem; }
.lead { font-size: 1.15rem; } .machine, details { color: var(--faint); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--faint); font-weight: 500; }
td, th { padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.met { color: var(--good); } .missed, .broken { color: var(--bad); font-weight: 600; }
svg { display: block; max-width: 100%; height: auto; margin: .75rem 0; overflow: visible; }
td svg { margin: 0; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .faint { fill: var(--faint); } .grid { stroke: var(--line); } .goal { stroke: var(--ink); }
.bar { fill: var(--a); } .range { stroke: var(--ink); stroke-width: 1.5; }
.s0 { --s: var(--a); } .s1 { --s: var(--b); } .s2 { --s: var(--c); } .s3 { --s: var(--d); }
.line { fill: none; stroke: var(--s); stroke-width: 2; } .dot { fill: var(--s); }
.good { fill: var(--good); stroke: var(--good); } .bad { fill: var(--bad); stroke: var(--bad); }
";
