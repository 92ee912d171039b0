// A table whose columns sort and whose rows come in pages.
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { t } from "../i18n";
import { Pager, Scroll } from "./basics";

export interface Column<T> {
  key: string;
  title: string;
  cell: (row: T) => ComponentChildren;
  /** What rows are sorted by; a column without it does not sort. */
  by?: (row: T) => number | string | null | undefined;
  /** Words, which stand on the left. */
  text?: boolean;
}

interface Props<T> {
  label: string;
  columns: readonly Column<T>[];
  rows: readonly T[];
  id: (row: T) => string;
  /** Key of the column that rows are sorted by at first; "-key" for the largest first. */
  first: string;
  perPage?: number;
  /** A box to tick before each row. */
  ticks?: { ticked: ReadonlySet<string>; onTick: (id: string, on: boolean) => void; name: (row: T) => string };
  rowClass?: (row: T) => string;
  /** No wider than its columns need. */
  narrow?: boolean;
}

export function Table<T>({ label, columns, rows, id, first, perPage = 50, ticks, rowClass, narrow }: Props<T>) {
  const [order, setOrder] = useState(first);
  const [page, setPage] = useState(0);
  const falling = order.startsWith("-");
  const key = falling ? order.slice(1) : order;
  const by = columns.find((column) => column.key === key)?.by;
  const sorted = useMemo(() => (by ? sortedBy(rows, by, falling) : rows), [rows, order, columns.length]);
  const pages = Math.ceil(sorted.length / perPage);
  const at = Math.min(page, Math.max(0, pages - 1));
  const sort = (column: Column<T>): void => {
    const byText = column.text;
    setOrder(key === column.key ? (falling ? column.key : `-${column.key}`) : byText ? column.key : `-${column.key}`);
    setPage(0);
  };
  return (
    <>
      <Scroll label={label}>
        <table class={narrow ? "num narrow" : "num"}>
          <thead>
            <tr>
              {ticks && <td class="tick-cell" />}
              {columns.map((column) => (
                <th scope="col" key={column.key} class={column.text ? "text" : ""} aria-sort={!column.by || column.key !== key ? undefined : falling ? "descending" : "ascending"}>
                  {column.by ? (
                    <button type="button" class="sort" onClick={() => sort(column)}>
                      {column.title}
                      <span aria-hidden="true">{column.key !== key ? "" : falling ? " ↓" : " ↑"}</span>
                    </button>
                  ) : (
                    column.title
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted.slice(at * perPage, (at + 1) * perPage).map((row) => (
              <tr key={id(row)} class={rowClass?.(row) ?? ""}>
                {ticks && (
                  <td class="tick-cell">
                    <input type="checkbox" aria-label={t("table.tick", { name: ticks.name(row) })} checked={ticks.ticked.has(id(row))} onChange={(event) => ticks.onTick(id(row), event.currentTarget.checked)} />
                  </td>
                )}
                {columns.map((column) => (
                  <td key={column.key} class={column.text ? "text" : ""}>{column.cell(row)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      <Pager page={at} pages={pages} onPage={setPage} />
    </>
  );
}

/** Rows without a value come last, in both directions. */
function sortedBy<T>(rows: readonly T[], by: (row: T) => number | string | null | undefined, falling: boolean): T[] {
  const keyed = rows.map((row) => ({ row, value: by(row) }));
  const sign = falling ? -1 : 1;
  keyed.sort((a, b) => {
    const missing = Number(a.value == null) - Number(b.value == null);
    if (missing) return missing;
    return a.value! < b.value! ? -sign : a.value! > b.value! ? sign : 0;
  });
  return keyed.map((one) => one.row);
}
