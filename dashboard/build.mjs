// Builds the dashboard: stubs from proto/, types checked, one script, compressed copies.
//
//   node dashboard/build.mjs [FOLDER]      into dashboard/dist, or into FOLDER
//
// The tools are those that scripts/install-services puts into target/tools.

import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const here = dirname(fileURLToPath(import.meta.url));
const tools = resolve(here, "../target/tools/node_modules");
const out = resolve(process.argv[2] ?? join(here, "dist"));
const { build, transform } = createRequire(join(tools, "x"))("esbuild");

// Where esbuild, the compiler and editors look for what the sources import.
const modules = join(here, "node_modules");
rmSync(modules, { force: true, recursive: true });
symlinkSync("../target/tools/node_modules", modules);

const run = (name, ...args) =>
  execFileSync(join(tools, ".bin", name), args, {
    cwd: here,
    stdio: ["ignore", "inherit", "inherit"],
    env: { ...process.env, PATH: `${join(tools, ".bin")}:${process.env.PATH}` },
  });
rmSync(join(here, "src/gen"), { force: true, recursive: true });
run("buf", "generate");
run("tsc", "--project", ".");

const read = (name) => readFileSync(join(here, "src", name), "utf8");
const versions = JSON.parse(read("../package.json")).devDependencies;
const library = (name, licence) => `${name} ${versions[name]} (${licence})`;
const notice = [
  library("@bufbuild/protobuf", "Apache-2.0 AND BSD-3-Clause"),
  library("@connectrpc/connect", "Apache-2.0"),
  library("@connectrpc/connect-web", "Apache-2.0"),
];
const script = await build({
  absWorkingDir: here,
  entryPoints: ["src/main.ts"],
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  legalComments: "none",
  banner: { js: `/* The dashboard of Seckill, with ${notice.join(", ")} in it. */` },
  write: false,
});
const style = await transform(read("dashboard.css"), { loader: "css", minify: true });
const page = read("index.html").replace(/>\s+</g, "><").trim() + "\n";
const files = {
  "index.html": page,
  "dashboard.js": script.outputFiles[0].text,
  "dashboard.css": style.code,
  "icon.svg": read("icon.svg").trim() + "\n",
};
mkdirSync(out, { recursive: true });
let [plain, small] = [0, 0];
for (const [name, text] of Object.entries(files)) {
  const zipped = gzipSync(text, { level: 9 });
  writeFileSync(join(out, name), text);
  writeFileSync(join(out, `${name}.gz`), zipped);
  plain += Buffer.byteLength(text);
  small += zipped.length;
}
console.log(`the dashboard has ${plain} bytes, ${small} compressed`);
