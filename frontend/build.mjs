// Bundles the page into src/atoll/ui/static; with --tests, bundles the tests for node into build/.
import { readFile, readdir, writeFile, copyFile, mkdir } from "node:fs/promises";
import { build } from "esbuild";

const OUT = new URL("../src/atoll/ui/static/", import.meta.url).pathname;
const common = { bundle: true, charset: "utf8", jsx: "automatic", jsxImportSource: "preact", logLevel: "warning" };

if (process.argv.includes("--tests")) {
  const tests = (await readdir("tests")).filter((name) => name.endsWith(".test.ts"));
  await build({ ...common, entryPoints: tests.map((name) => `tests/${name}`), outdir: "build", platform: "node", format: "esm", outExtension: { ".js": ".mjs" } });
} else {
  await mkdir(OUT, { recursive: true });
  await build({ ...common, entryPoints: { app: "src/main.tsx" }, outdir: OUT, format: "iife", target: "es2022", minify: true, legalComments: "none" });
  await copyFile("src/index.html", `${OUT}index.html`);
  await writeFile(`${OUT}LICENSES.txt`, await licences(["preact", "uplot"]));
}

/** Return the licences of the packages that the bundle contains. */
async function licences(names) {
  const texts = [];
  for (const name of names) {
    const { version } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
    const text = await readFile(`node_modules/${name}/LICENSE`, "utf8");
    texts.push(`app.js and app.css contain ${name} ${version}:\n\n${text.trim()}\n`);
  }
  return texts.join("\n----\n\n");
}
