// Files that the page makes itself.

export function saveBlob(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.=+-]+/g, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Save a table as CSV (RFC 4180). Text that a spreadsheet would take for a formula gets an apostrophe. */
export function saveCsv(rows: (string | number | null)[][], name: string): void {
  const text = rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  saveBlob(new Blob([text], { type: "text/csv" }), name);
}

function cell(value: string | number | null): string {
  if (value === null) return "";
  if (typeof value === "number") return String(value);
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
